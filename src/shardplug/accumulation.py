"""Gradient accumulation: where a micro-batch stands in its window, and what its loss weighs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from shardplug.errors import PlanError
from shardplug.plan.window import Accumulation, Window
from shardplug.prepared import PreparedLoader


@runtime_checkable
class _CanSkipSync(Protocol):
    """A module such as DDP, whose gradients stay on each rank within ``no_sync()``."""

    def no_sync(self) -> AbstractContextManager[None]: ...


@runtime_checkable
class _CanSwitchSync(Protocol):
    """A module such as those of FSDP2, which is told whether to synchronise gradients."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The micro-batch that is out, in the window of one optimizer step.

    Attributes:
        loader: Where it is from.
        window: Its place in the window.
        step: Its step in the pass.
        pass_number: The pass that it is from.
    """

    loader: PreparedLoader
    window: Window
    step: int
    pass_number: int

    @property
    def is_out(self) -> bool:
        """Whether no further batch has come since."""
        return self.loader.pass_number == self.pass_number and self.loader.step == self.step

    def is_abandoned_for(self, other: MicroBatch) -> bool:
        """Tell whether its window was left open by a pass, and another one begins a new window."""
        is_of_new_pass = self.loader is other.loader and self.pass_number != other.pass_number
        return is_of_new_pass and not self.window.closes and other.window.index == 0

    @property
    def share(self) -> float:
        """What a mean loss weighs if all micro-batches of the window are alike."""
        return 1 / self.window.micro_batches

    def share_of(self, valid_rows: int) -> float:
        """What a mean loss over some real rows weighs in the mean over all of the window's.

        Gradients are averaged over the ranks, so that of ``v`` rows counts ``ranks * v / n``, where
        all ranks have ``n`` real rows in the window.

        Raises:
            PlanError: If the real rows of the window are not known: of a loader without a declared
                batch size.
        """
        first = self.step - self.window.index
        rows = self.loader.real_rows(first, first + self.window.micro_batches)
        if rows is None:
            raise PlanError(
                "`valid_rows` must come from a loader with a declared batch size, got one without: "
                "the rows of the other ranks are not known. Leave it out."
            )
        return self.loader.shard.count * valid_rows / rows if rows else 0.0


def find_micro_batch(loaders: Sequence[PreparedLoader], steps: int) -> MicroBatch | None:
    """Find the micro-batch that is out in the innermost pass under way.

    Args:
        loaders: Those that it may be from.
        steps: Micro-batches in a full window.

    Returns:
        The micro-batch, or None if no pass is under way.
    """
    under_way = [loader for loader in loaders if loader.pass_number]
    if not under_way:
        return None
    loader = max(under_way, key=lambda each: each.pass_number)
    window = window_of(loader, steps)
    return MicroBatch(loader, window, loader.step, loader.pass_number)


def window_of(loader: PreparedLoader, steps: int) -> Window:
    """Find the place of the latest micro-batch of a loader's pass in its window.

    A pass that goes on inside a window begins with the micro-batches that are left of it.

    Args:
        loader: Has handed out a batch in the pass.
        steps: Micro-batches in a full window.
    """
    before, num_steps = loader.open_window.micro_batches, loader.num_steps
    windows = Accumulation(steps, None if num_steps is None else before + num_steps)
    return windows.window(before + loader.step, is_last=loader.end_of_dataloader)


@contextmanager
def synchronising(models: Sequence[Any], *, is_needed: bool) -> Iterator[None]:
    """Let models synchronise their gradients in backward only where the window closes.

    Args:
        models: Modules; those that do not synchronise by themselves are left alone.
        is_needed: Whether this micro-batch closes its window.
    """
    with ExitStack() as stack:
        for model in models:
            if isinstance(model, _CanSwitchSync):
                model.set_requires_gradient_sync(is_needed)
                if not is_needed:  # as DDP does at the end of its `no_sync`
                    stack.callback(model.set_requires_gradient_sync, True)
            elif isinstance(model, _CanSkipSync) and not is_needed:
                stack.enter_context(model.no_sync())
        yield
