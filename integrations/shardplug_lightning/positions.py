"""Where training stands, in checkpoints and after them.

Lightning counts the batches that have been processed; that is the truth, however many loaders have
handed out ahead of it. What is saved is the state of every training loader at that count, or at the
last optimizer step, so that a window of accumulated gradients that a stop cuts open is made again.
States are the same on every rank: nothing is gathered, since a checkpoint may be saved by one rank
that has failed.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import CombinedLoader

from shardplug import ShardplugWarning, StateError
from shardplug_lightning.endings import (
    Owed,
    align,
    announce_epoch,
    known_metrics,
    leave_behind,
    owed_after,
    rewind,
    take_back_end,
    take_back_fetch,
)
from shardplug_lightning.internals import (
    callbacks_of,
    count_as_over,
    count_batches,
    fetch_again,
    follows_shortest,
    forget_failed,
)
from shardplug_lightning.parts import Parts, States
from shardplug_lightning.views import LoaderView, Spot

KEY = "shardplug"
VERSION = 1

_SLACK = 3
"""One batch is fetched ahead, one may have failed, and one is still to be noted."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in training.

    Attributes:
        epoch: Lightning's epoch.
        batches: How many batches of it are done on each rank.
        loaders: The states of the training loaders.
        have_ended: Whether each of them has been read to its end in the epoch.
        own: What this rank has of its own of their states.
    """

    epoch: int
    batches: int
    loaders: tuple[Mapping[str, Any], ...]
    have_ended: tuple[bool, ...]
    own: States = ()

    def as_dict(self) -> dict[str, Any]:
        """Write it as numbers and strings."""
        loaders = [dict(state) for state in self.loaders]
        entry = {
            "version": VERSION,
            "epoch": self.epoch,
            "batches": self.batches,
            "loaders": loaders,
            "have_ended": list(self.have_ended),
        }
        if any(self.own):
            entry["own"] = [list(each) for each in self.own]
        return entry

    @classmethod
    def read(cls, entry: Any) -> Place:
        """Read what `as_dict` made.

        Raises:
            StateError: If it is something else.
        """
        if not isinstance(entry, Mapping) or entry.get("version") != VERSION:
            found = entry.get("version") if isinstance(entry, Mapping) else entry
            raise StateError(
                f"`{KEY}` of the checkpoint must be of version {VERSION}, got {found!r}. "
                "Load it with the version of shardplug that saved it."
            )
        for name, kind in (
            ("epoch", int),
            ("batches", int),
            ("loaders", list),
            ("have_ended", list),
            ("own", list),
        ):
            if not isinstance(entry.get(name, [] if name == "own" else None), kind):
                raise StateError(
                    f"`{name}` of `{KEY}` in the checkpoint must be of type {kind.__name__}, got "
                    f"{entry.get(name)!r:.60}. The checkpoint is damaged: take another one."
                )
        loaders, have_ended = tuple(entry["loaders"]), tuple(map(bool, entry["have_ended"]))
        own = tuple(tuple(each) for each in entry.get("own", ()))
        return cls(entry["epoch"], entry["batches"], loaders, have_ended, own)

    @property
    def counts_steps(self) -> bool:
        """Whether a loader's data divides itself, so that its place is of this many ranks."""
        return any(state.get("steps") is not None for state in self.loaders)

    def own_of(self, number: int) -> tuple[str, ...]:
        """Return what this rank has of its own of a loader's state."""
        return self.own[number] if number < len(self.own) else ()


def without_own(place: Place, parts: Parts, num_ranks: int) -> Place:
    """Leave out what ranks had of their own, for another number of them to go on.

    Raises:
        StateError: If the data divides itself, so that only as many ranks can.
    """
    if place.counts_steps:
        raise StateError(
            f"`devices` must make {parts.world_size} ranks, each of which has read a part of its "
            f"own of the training data, got {num_ranks}. Train on as many as before, or go on from "
            "a checkpoint of the end of an epoch. With dispatch_batches=True any number would do."
        )
    warnings.warn(
        f"The states that the data sets of {parts.world_size} ranks had are left out: there are "
        f"{num_ranks} now. The samples go on where they were.",
        ShardplugWarning,
        stacklevel=2,
    )
    return replace(place, own=())


class TrainingBook:
    """Keeps track of the training loaders of a strategy.

    Attributes:
        place: Where to go on; None once training has.
    """

    def __init__(self) -> None:
        self.place: Place | None = None
        self._was_sent = False
        self._trainer: Trainer | None = None
        self._epoch: int | None = None
        self._ahead = 0
        self._marks: dict[int, list[Spot]] = {}
        self._seen: Any = None
        self._views: list[LoaderView] = []
        self._began_at: Place | None = None
        self._owed: Owed | None = None

    # -- told by the views ---------------------------------------------------------------------

    def begin(self, view: LoaderView) -> bool:
        """Choose where the pass starts that is about to.

        Usually Lightning has: it sets the epoch. It knows nothing of positions, nor that a loader
        which is read several times in one of its epochs goes through several of its own.

        Returns:
            Whether there is a pass. A loader that had been read to its end before training goes on
            ends once more at first: so Lightning learns of it.

        Raises:
            StateError: If the checkpoint does not fit the loaders.
        """
        epoch, ended = self._current_epoch(), view.track.ended
        if ended is not None and ended[0] == epoch:
            view.set_epoch(ended[1] + 1)
            return True
        place = self.place
        if place is not None and place.epoch == epoch and self._send(view, place):
            view.track.ended = epoch, view.epoch - 1
            return False
        return True

    def end(self, view: LoaderView, epoch: int) -> None:
        """Note that a pass has run to its end, over an epoch of the loader's own."""
        view.track.ended = self._current_epoch(), epoch

    def spots_of(self, view: LoaderView) -> Iterator[Spot]:
        """List the places of a loader that may be asked for."""
        for number, each in enumerate(self._views):
            if each is view:
                return (spots[number] for spots in self._marks.values())
        return iter(())

    def _current_epoch(self) -> int:
        assert self._trainer is not None  # set before there was a view
        epoch = self._trainer.current_epoch
        # Lightning counts an epoch that was over when it was saved only after the first fetch.
        return epoch if self.place is None else max(epoch, self.place.epoch)

    def _send(self, view: LoaderView, place: Place) -> bool:
        """Let the next pass of a view start where it was; tells whether one had ended before."""
        views = self._all_views()
        if len(views) != len(place.loaders):
            raise StateError(
                f"`loaders` of the checkpoint must be as many as there are to train on, "
                f"{len(views)}, got {len(place.loaders)}. Train on the loaders that were saved."
            )
        number = next(number for number, each in enumerate(views) if each is view)
        own = place.own_of(number) if view.reads else ()
        start, seed = view.read_state(place.loaders[number], own)
        view.go_to(start, seed)
        if place.batches == 0:
            if not start.is_start:
                # A short loader may have been in an epoch of its own that has the same number.
                view.set_epoch(start.epoch + 1)
            view.set_epoch(place.epoch)
        self._was_sent = True
        # What is left of an epoch that is done is empty: it ends by itself.
        return place.batches > 0 and place.have_ended[number] and not start.is_done

    def _all_views(self) -> list[LoaderView]:
        assert self._trainer is not None  # set before there was a view
        found = self._trainer.train_dataloader
        if found is not self._seen:
            self._seen = found
            flat = [] if found is None else CombinedLoader(found).flattened
            self._views = [each for each in flat if isinstance(each, LoaderView)]
        return self._views

    # -- told by the strategy ------------------------------------------------------------------

    def open(self, trainer: Trainer, loader: Any) -> None:
        """Take note of a loader that training is about to read."""
        self._trainer = trainer
        if _fetches_by_itself(trainer.lightning_module):
            self._ahead = -1
        loader.keep_history(_longest_window(trainer) + _SLACK)

    def go_on(self, trainer: Trainer) -> None:
        """Let Lightning count from where the loaders are, before the first batch of a run.

        On another number of ranks an epoch has another number of batches.

        Raises:
            StateError: If the checkpoint does not fit the loaders; on all ranks.
        """
        self._trainer, self._epoch, self._marks = trainer, None, {}
        place, views = self.place, self._all_views()
        if not views:
            return
        forget_failed(trainer)
        if place is None:
            return
        if trainer.num_training_batches == math.inf:
            self._fetch_anew(trainer, place)
        else:
            self._count(trainer, place, views)
        announce_epoch(trainer)
        if self._owed is not None:
            self._owed.settle(trainer)
            self._owed = None

    def _fetch_anew(self, trainer: Trainer, place: Place) -> None:
        """Begin where the end of the epoch is not known, and batches may have been fetched."""
        if _fetches_by_itself(trainer.lightning_module):
            for view in self._all_views():
                self._send(view, place)
        elif not self._was_sent:
            fetch_again(trainer)  # what was fetched before the checkpoint was read

    def _count(self, trainer: Trainer, place: Place, views: Sequence[LoaderView]) -> None:
        for view in views:
            self._send(view, place)
        if place.batches == 0:
            count_as_over(trainer)
            return
        leading = (min if follows_shortest(trainer) else max)(views, key=_length)
        if _length(leading) < math.inf:  # else there is a limit, which counts the same everywhere
            count_batches(trainer, len(leading) - leading.remaining_steps)

    def mark(self, batch: int) -> None:
        """Note where the loaders stand when a batch is about to be trained on; cheap.

        Args:
            batch: Its number in the epoch, as Lightning counts.
        """
        trainer, marks = self._trainer, self._marks
        if trainer is None:
            return  # there are no loaders of this strategy's
        if self._ahead < 0:
            batch = trainer.fit_loop.batch_idx  # the other one is that of the latest fetch
        if trainer.current_epoch != self._epoch:
            self._begin_epoch(trainer, batch)
            if self._ahead < 0:
                return  # nothing of the pass has been fetched, so that it is noted there
        views, epoch, ahead = self._views, self._epoch, self._ahead
        if ahead > 0 and trainer.is_last_batch:
            ahead = 0
        if batch not in marks:
            marks[batch] = [view.spot(ahead + 1, epoch) for view in views]
        marks[batch + 1] = [view.spot(ahead, epoch) for view in views]
        if len(marks) > trainer.accumulate_grad_batches + 1:
            self._forget_before(batch - batch % trainer.accumulate_grad_batches)

    def _forget_before(self, batch: int) -> None:
        """Drop what no open window goes back to: nearly always one mark, the oldest."""
        marks = self._marks
        while (oldest := next(iter(marks))) < batch:
            del marks[oldest]

    def _begin_epoch(self, trainer: Trainer, batch: int) -> None:
        self._marks.clear()
        self._epoch = trainer.current_epoch
        self._all_views()  # loaders may have been made anew, which they are between epochs only
        # Where the end is not known, Lightning fetches one batch ahead to see it come.
        self._ahead = int(trainer.num_training_batches == math.inf)
        if _fetches_by_itself(trainer.lightning_module):
            self._ahead = -1
        self._began_at = self.place
        if self.place is not None and self.place.batches:
            known = zip(self.place.loaders, self.place.have_ended, strict=True)
            self._marks[batch] = [Spot(0, 0, state, has_ended) for state, has_ended in known]
        if self._ahead < 0:
            self._mark_coming(batch)
        self.place, self._was_sent = None, False

    def _mark_coming(self, batch: int) -> None:
        """Note the places before and after the first batch of passes that are still to begin."""
        numbers = [view.track.pass_number + 1 for view in self._views]
        first = self._marks.setdefault(batch, [Spot(number, 0) for number in numbers])
        self._marks[batch + 1] = [
            Spot(number, 1, None, spot.has_ended)
            for number, spot in zip(numbers, first, strict=True)
        ]

    def close(self) -> None:
        """Make the states that may be asked for after training, while the passes are there."""
        for view in self._views:
            view.keep(self.spots_of(view))

    def write(self, trainer: Trainer, checkpoint: dict[str, Any]) -> Place | None:
        """Put the place into a checkpoint that is about to be saved.

        Not collective: one rank alone may be saving.

        Returns:
            The place, if ranks have something of their own there.
        """
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops is None or self._trainer is None or not self._all_views():
            return None  # only weights are saved, or nothing has been trained on
        loops["state_dict"].pop("combined_loader", None)  # rank 0's, which Lightning gives to all
        if self._is_between_batches(trainer, loops):
            take_back_fetch(loops)
        if self._was_cut_short(trainer, loops):
            take_back_end(loops)
            checkpoint["epoch"] = self._epoch
        place = self._place_at(trainer, loops)
        metrics = known_metrics(trainer, loops, is_over=place.batches == 0)
        checkpoint[KEY] = {**place.as_dict(), "metrics": metrics}
        return place if place.batches and self.differs_by_rank else None

    @property
    def differs_by_rank(self) -> bool:
        """Whether ranks have something of their own of the states of the training loaders."""
        return self._trainer is not None and any(each.differs_by_rank for each in self._all_views())

    def _is_between_batches(self, trainer: Trainer, loops: Mapping[str, Any]) -> bool:
        """Tell whether all that follows a batch is done, and the next one is not there yet.

        So it is where that cannot be read or moved, and where SIGTERM ends training.
        """
        batches = loops["epoch_loop.batch_progress"]["current"]
        is_idle = trainer.training and batches["ready"] == batches["completed"] > 0
        return self._owed is None and is_idle and _is_under_way(loops)

    def _was_cut_short(self, trainer: Trainer, loops: Mapping[str, Any]) -> bool:
        """Tell whether training was stopped inside an epoch, which Lightning counts as done."""
        if self._epoch is None or not self._marks:
            return False
        epochs = loops["epoch_progress"]["current"]
        # Where the next one has begun, the counts of batches are of that.
        is_counted = epochs["started"] == epochs["processed"] == self._epoch + 1
        progress = loops["epoch_loop.batch_progress"]
        is_over = _is_over(progress, trainer.num_training_batches) or self._has_ended(trainer)
        return is_counted and not is_over

    def _has_ended(self, trainer: Trainer) -> bool:
        """Tell whether the loaders were found to be at their end, where Lightning foresaw none.

        So it is where a training step asks for its batches, and their number is not known.
        """
        found = [view.track.ended for view in self._views]
        have_ended = [each is not None and each[0] == self._epoch for each in found]
        return (any if follows_shortest(trainer) else all)(have_ended)

    def _place_at(self, trainer: Trainer, loops: Mapping[str, Any]) -> Place:
        epoch = loops["epoch_progress"]["current"]["processed"]
        progress = loops["epoch_loop.batch_progress"]
        done = progress["current"]["processed"]
        if self._epoch is None and self.place is not None and self.place.epoch >= epoch:
            return self.place
        if epoch == self._epoch and self._marks:
            if not _is_over(progress, trainer.num_training_batches):
                return self._place_in_epoch(done, trainer.accumulate_grad_batches)
            epoch += 1
        states = tuple(view.state_dict() for view in self._views)
        return Place(epoch, 0, states, (False,) * len(states))

    def _place_in_epoch(self, done: int, window: int) -> Place:
        """Go back to where the open window began, or where this run did."""
        wanted = done - done % window
        known = sorted(self._marks)
        batches = next((each for each in known if each >= wanted), known[-1])
        spots = zip(self._views, self._marks[batches], strict=True)
        found = [(view.state_of(spot), view, spot) for view, spot in spots]
        states = tuple(state for state, *_ in found)
        ended = tuple(spot.has_ended for spot in self._marks[batches])
        own = tuple(
            self._own_of(number, view, spot, state)
            for number, (state, view, spot) in enumerate(found)
        )
        return Place(self._epoch or 0, batches, states, ended, own)

    def _own_of(
        self, number: int, view: LoaderView, spot: Spot, state: Mapping[str, Any]
    ) -> tuple[str, ...]:
        if spot.pass_number == 0 and self._began_at is not None:
            return self._began_at.own_of(number)
        return view.own_of(spot, state)

    def read(self, checkpoint: dict[str, Any]) -> None:
        """Take the place out of a checkpoint that has been loaded, for training to go on there.

        What Lightning is to count is set right too: a cut window is made again, and a validation
        that was cut short is run from its start.

        Raises:
            StateError: If what is there is no place.
        """
        self.place, self._was_sent, self._owed = None, False, None
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops is None:
            return
        loops["state_dict"].pop("combined_loader", None)
        for name in ("epoch_loop.batch_progress", "epoch_loop.val_loop.batch_progress"):
            align(loops[name])
        if _has_to_validate(loops):
            # Lightning goes back into one that failed inside a step, at its first batch here.
            rewind(loops["epoch_loop.val_loop.batch_progress"], 0)
        done = loops["epoch_loop.batch_progress"]["current"]["processed"]
        epoch = loops["epoch_progress"]["current"]["processed"]
        if KEY not in checkpoint:
            if not _is_over(loops["epoch_loop.batch_progress"], None) and done:
                _warn_of_no_place(done)
            return
        self.place = place = Place.read(checkpoint[KEY])
        if place.epoch == epoch and not _is_under_way(loops):
            leave_behind(loops["epoch_loop.batch_progress"])
        elif place.epoch == epoch and place.batches < done:
            rewind(loops["epoch_loop.batch_progress"], place.batches)
        is_over = place.epoch > epoch
        self._owed = owed_after(
            loops,
            is_whole=is_over or place.batches == done,
            is_over=is_over,
            metrics=checkpoint[KEY].get("metrics", {}),
        )


def _length(view: LoaderView) -> float:
    """Count the batches of an epoch; infinite where that is not known."""
    try:
        return len(view)
    except TypeError:
        return math.inf


def _is_over(progress: Mapping[str, Any], num_batches: float | None) -> bool:
    """Tell whether the last batch of an epoch has been processed."""
    current = progress["current"]
    is_last = progress["is_last_batch"] or current["ready"] == num_batches
    return bool(is_last) and current["processed"] == current["ready"] > 0


def _is_under_way(loops: Mapping[str, Any]) -> bool:
    """Tell whether an epoch is; else the counts of batches are those of the one before."""
    current = loops["epoch_progress"]["current"]
    return bool(current["started"] == current["processed"] + 1)


def _has_to_validate(loops: Mapping[str, Any]) -> bool:
    """Tell whether a validation had begun that has not come to its end, if one was due at all."""
    progress = loops["epoch_loop.val_loop.batch_progress"]
    current, batches = progress["current"], loops["epoch_loop.batch_progress"]["current"]
    if current["ready"]:
        return current["completed"] < current["ready"] or not progress["is_last_batch"]
    # Before its first batch nothing tells but that the batch of training has been left behind.
    return bool(batches["ready"] == batches["completed"] > 0)


def _longest_window(trainer: Trainer) -> int:
    """Count the most batches of which gradients are accumulated in a run."""
    steps = [trainer.accumulate_grad_batches]
    for each in callbacks_of(trainer):
        if isinstance(each, GradientAccumulationScheduler):
            steps += each.scheduling.values()
    return max(steps)


def _fetches_by_itself(module: LightningModule) -> bool:
    """Tell whether a training step asks for its batches, instead of being given one."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters


def _warn_of_no_place(done: int) -> None:
    batches = "1 batch" if done == 1 else f"{done} batches"
    warnings.warn(
        f"The checkpoint was saved after {batches} of an epoch, without the positions of the "
        "loaders: the steps that are left of it read its data from the start. Save checkpoints "
        "with this strategy.",
        ShardplugWarning,
        stacklevel=2,
    )
