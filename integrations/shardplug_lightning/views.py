"""What Lightning sees of a prepared loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader

from shardplug import CommError, DataLoaderDispatcher, DataLoaderShard, PlanError

if TYPE_CHECKING:
    _Prepared = DataLoaderShard
else:
    _Prepared = object  # a view is added to either class of prepared loaders


@dataclass(slots=True)
class Spot:
    """A place in the data: after some steps of a pass.

    Attributes:
        pass_number: Which pass of its loader, from 1.
        step: Steps of it that are done.
        state: The loader's state there, once it has been made.
        has_ended: Whether the loader has been read to its end before, in the same epoch.
        own: What this rank has of its own of the state, once that has been made.
    """

    pass_number: int
    step: int
    state: Mapping[str, Any] | None = None
    has_ended: bool = False
    own: tuple[str, ...] | None = None


class Book(Protocol):
    """Who keeps track of where training stands; told of each pass."""

    def begin(self, view: LoaderView) -> bool:
        """Choose where the pass starts that is about to; tells whether there is one."""

    def end(self, view: LoaderView, epoch: int) -> None:
        """Note that a pass has run to its end, over an epoch of the loader's own."""

    def spots_of(self, view: LoaderView) -> Iterable[Spot]:
        """List the places of a loader that may be asked for."""


@dataclass(slots=True)
class Track:
    """What is known of a view's passes.

    Attributes:
        pass_number: The latest pass, from 1; 0 before the first.
        ended: In which epoch of Lightning's, and in which of the loader's, the latest pass that ran
            to its end did.
        last: The state while the last batch was out, if the latest pass has ended.
        is_counting: Whether rows are counted, for whoever asks.
        samples: Real rows since they were last asked for.
        repeats: Rows that only filled batches up.
    """

    pass_number: int = 0
    ended: tuple[int, int] | None = None
    last: Mapping[str, Any] | None = None
    is_counting: bool = False
    samples: int = 0
    repeats: int = 0


class LoaderView(_Prepared):
    """A prepared loader whose passes are noted, so that training can go on where it was.

    Everything else is the loader's own; it is the same loader, seen through another class.

    Args:
        loader: The loader; it remains usable.
        source: What the user gave, for a stage that divides it in another way.
        book: Who keeps track of its passes; None: nobody does.
    """

    _view_source: Any
    _view_book: Book | None
    _view_track: Track
    _view_told: list[Any] | None
    _view_is_open: bool

    def __init__(self, loader: Any, source: Any, book: Book | None = None) -> None:
        # Assigned past the loader's own way, which hands attributes on to torch's loader inside.
        object.__setattr__(self, "__dict__", vars(loader))
        for name, value in (
            ("_view_source", source),
            ("_view_book", book),
            ("_view_track", Track()),
            ("_view_told", None),
            ("_view_is_open", False),
        ):
            object.__setattr__(self, name, value)

    def tell(self, told: list[Any]) -> None:
        """Put the indices of each batch somewhere, which only a dispatcher has to be told of."""
        object.__setattr__(self, "_view_told", told)

    def compare_ends(self) -> None:
        """Compare at the start of each pass whether all ranks have a batch, or none has."""
        object.__setattr__(self, "_view_is_open", True)

    @property
    def dataset(self) -> Any:  # type: ignore[override]  # an attribute of torch's
        """The data set of the loader; of ready batches, what the user gave.

        What iterates those is a stream of this library's, of which users have not heard.
        """
        own = self._view_source
        is_ready = own is not None and not isinstance(own, DataLoader)
        return own if is_ready else super().__getattr__("dataset")

    @property
    def source(self) -> Any:
        """What the user gave."""
        return self._view_source

    @property
    def reads(self) -> bool:
        """Whether this rank reads data: of a dispatcher, the first does."""
        return True

    @property
    def track(self) -> Track:
        """What is known of its passes."""
        return self._view_track

    def spot(self, back: int, epoch: int | None) -> Spot:
        """Return the place that is some steps before what has been handed out.

        Args:
            back: How many; below zero for steps that are still to come.
            epoch: Lightning's epoch.
        """
        track, run, ended = self._view_track, self.run, self._view_track.ended
        has_ended = ended is not None and ended[0] == epoch
        step = 0 if run is None else run.step
        if run is None or step == 0 or (run.was_left and not self.has_pass):
            # The last state is of a pass that is over: what is still to come is of another one.
            state = track.last if back >= 0 else None
            return Spot(track.pass_number, max(0, step - back), state, has_ended)
        return Spot(track.pass_number, step - back if step > back else 0, None, has_ended)

    def state_of(self, spot: Spot) -> Mapping[str, Any]:
        """Tell the loader's state at a place in its latest pass, or in one that ran to its end."""
        if spot.state is not None:
            return spot.state
        if spot.pass_number == self._view_track.pass_number and self.has_pass:
            return self.state_at(spot.step)
        return self.state_dict()

    def own_of(self, spot: Spot, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Tell what is not in the state at a place: states of the source, this rank's own."""
        if spot.own is not None:
            return spot.own
        if spot.state is not None or state.get("source") is not None:
            return ()
        is_under_way = spot.pass_number == self._view_track.pass_number and self.has_pass
        return tuple(self.rank_state(spot.step if is_under_way else None))

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Start a pass at its first ``next``, and have it noted.

        Collective: the first ``next`` is.
        """
        book, track = self._view_book, self._view_track
        if book is None:
            yield from self._evaluated(super().__iter__())
            return
        if not book.begin(self):
            return
        track.pass_number += 1
        track.last = None
        run = None
        try:
            for batch in super().__iter__():
                run = run or self.run
                if track.is_counting:
                    track.samples += self.valid_rows
                    track.repeats += self.num_rows - self.valid_rows
                yield batch
                if run is not None and run.step == run.record.num_steps:
                    self._settle(book)
        except GeneratorExit:
            raise  # it is left
        except BaseException:
            self._keep_failed(book)
            raise
        # What comes next may have been chosen long since: once a batch had been fetched ahead.
        book.end(self, self.epoch - 1 if run is None else run.epoch)

    def _evaluated(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a pass that is no training."""
        if self._view_is_open:
            batches = self._compared(batches)
        told = self._view_told
        if told is None:
            yield from batches
            return
        told.clear()
        for batch in batches:
            if self.indices is not None:
                told.append(self.indices)
            yield batch

    def _compared(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Raise on all ranks if some have no batch: they would not come to where others wait."""
        failure: Exception | None = None
        first: list[Any] = []
        try:
            first = list(islice(batches, 1))
        except Exception as error:  # noqa: BLE001  # raised again below, once all ranks know
            failure = error
        has_batch = [-1 if failure else len(first)]
        by_rank = [each for (each,) in self.comm.all_gather_ints(has_batch)]
        if failure is not None:
            raise failure
        if -1 in by_rank:
            raise CommError(f"Rank {by_rank.index(-1)} could not read its first batch.")
        if 0 in by_rank and 1 in by_rank:
            raise PlanError(
                f"`dataloader` must have a batch for every rank, got {sum(by_rank)} for "
                f"{len(by_rank)} ranks. Give it more batches, or use fewer ranks."
            )
        return chain(first, batches)

    def _settle(self, book: Book) -> None:
        """Make the states of this pass that may be asked for later, while it is still there."""
        self._view_track.last = self.state_dict()
        self.keep(book.spots_of(self))

    def _keep_failed(self, book: Book) -> None:
        """Make the states of a pass in which data could not be read.

        If the epoch was set while it was under way, as Lightning does where it has fetched ahead,
        the loader stands in the next pass already.
        """
        run = self.run
        if run is not None:
            run.was_left = False
            self.keep(book.spots_of(self))
            run.was_left = True

    def keep(self, spots: Iterable[Spot]) -> None:
        """Make the states at places in the latest pass, while that is still there."""
        for spot in spots if self.has_pass else ():
            if spot.state is None and spot.pass_number == self._view_track.pass_number:
                state = self.state_at(spot.step)
                spot.own, spot.state = self.own_of(spot, state), state


class ShardView(LoaderView, DataLoaderShard):
    """A view of a loader of which each rank reads its part."""


class DispatcherView(LoaderView, DataLoaderDispatcher):  # type: ignore[misc]  # see `_Prepared`
    """A view of a loader that one rank reads for all."""

    @property
    def reads(self) -> bool:
        """Whether this rank is the one that reads."""
        return self.comm.rank == 0


def view_of(loader: Any, source: Any, book: Book | None = None) -> LoaderView:
    """Make a view of a prepared loader, of its own class."""
    kind = DispatcherView if isinstance(loader, DataLoaderDispatcher) else ShardView
    return kind(loader, source, book)
