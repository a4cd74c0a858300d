"""The epoch of a loader, and its samplers as trainers see them.

Trainers set the epoch on whatever sampler they find in a loader. The views here pass it on to the
loader, and hold nothing but the loader's progress, so that no cycle keeps worker processes alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, Sampler

from shardplug.feeds import Feed
from shardplug.passes import Pass
from shardplug.plan.cursor import Progress
from shardplug.plan.split import Tail
from shardplug.samplers import HasEpoch


@dataclass(slots=True)
class Epochs:
    """The epoch of a loader, shared with the views of its samplers.

    Attributes:
        progress: Where the loader stands.
        parts: What has to be told the epoch.
    """

    progress: Progress
    parts: list[HasEpoch]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and tell all parts."""
        self.progress.set_epoch(epoch)
        self.tell(self.progress.upcoming.epoch)

    def tell(self, epoch: int) -> None:
        """Tell all parts which epoch comes next."""
        for part in self.parts:
            part.set_epoch(epoch)


class EpochSampler(Sampler[Any]):
    """The sampler of a prepared loader, as trainers see it: `set_epoch` reaches the loader.

    Everything else is that of the sampler inside.
    """

    def __init__(self, sampler: Any, epochs: Epochs) -> None:
        self._sampler = sampler
        self._epochs = epochs

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the loader's next pass."""
        self._epochs.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield what the sampler inside yields: the whole epoch, not only this shard's part."""
        return iter(self._sampler)

    def __len__(self) -> int:
        """Count the samples of the whole epoch."""
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the sampler inside."""
        if name.startswith("__") or name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)


class PassBatches(BatchSampler):
    """The batch sampler of a prepared loader: the index batches of the pass that is under way.

    Iterated on its own, outside of a pass of the loader, it yields this shard's batches of the
    upcoming epoch.
    """

    def __init__(self, feed: Feed, sampler: Any, epochs: Epochs) -> None:
        self._feed = feed
        self._epochs = epochs
        self.sampler = EpochSampler(sampler, epochs)
        self._offered: Pass | None = None

    def offer(self, pass_: Pass) -> None:
        """Let the next iteration be a pass of the loader."""
        self._offered = pass_

    def withdraw(self, pass_: Pass) -> bool:
        """Take an offer back; tells whether it had been taken up."""
        is_open = self._offered is pass_
        if is_open:
            self._offered = None
        return not is_open

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the loader's next pass."""
        self._epochs.set_epoch(epoch)

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]  # users' may declare none
        """The batch size that the user's batch sampler declares."""
        return self._feed.batch_size

    @property
    def drop_last(self) -> bool:  # type: ignore[override]
        """Whether rows may be dropped at the end."""
        return self._feed.tail is Tail.DROP

    def __iter__(self) -> Iterator[Any]:
        """Yield the index batches of the pass that the loader offers, else of the next epoch."""
        offered, self._offered = self._offered, None
        if offered is None:
            upcoming = self._epochs.progress.upcoming
            self._epochs.tell(upcoming.epoch)
            offered, _ = self._feed.begin(upcoming)
        return iter(offered)

    def __len__(self) -> int:
        """Count the index batches of a full pass."""
        return len(self._feed)
