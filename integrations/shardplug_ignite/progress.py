"""``engine.state.shard``: where a run stands, for those who read an engine's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from shardplug_ignite.attachment import Attachment


@final
@dataclass(frozen=True, slots=True)
class ShardProgress:
    """Where a run stands; every number is that of the moment it is read.

    ``Checkpoint(..., global_step_transform=lambda *_: trainer.state.shard.global_step)`` names its
    files by a number that only grows, also where an epoch has fewer iterations after a resume.

    Attributes:
        attachment: Keeps the numbers.
    """

    attachment: Attachment

    @property
    def epoch(self) -> int:
        """The epoch of the data's order, from zero, that a run could go on in."""
        position = self.attachment.position
        return 0 if position is None else int(position["epoch"])

    @property
    def consumed(self) -> int:
        """Samples (or batches) of its order that are done, over all ranks; no padding."""
        position = self.attachment.position
        return 0 if position is None else int(position["consumed"])

    @property
    def optimizer_steps(self) -> int | None:
        """Optimizer steps that really happened; None where the optimizer is not known."""
        return self.attachment.optimizer_steps

    @property
    def valid_rows(self) -> int:
        """Rows of this rank's batch that are no padding; 0 if no batch is out."""
        loader = self.attachment.loader
        return 0 if loader is None else loader.valid_rows

    @property
    def is_last_batch(self) -> bool:
        """Whether the batch that is out is the last of its pass over the data."""
        loader = self.attachment.loader
        return loader is not None and loader.end_of_dataloader

    @property
    def global_step(self) -> int:
        """Iterations that were completed in training, before a resume too; it never goes back."""
        return self.attachment.global_step
