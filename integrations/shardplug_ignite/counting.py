"""Where the counts of an engine stand, and where those of a run that goes on are to.

Ignite derives the epoch from the iteration, so all epochs are to have one length; on other ranks
that is another one, and an epoch that was left early has none of it.
"""

from __future__ import annotations

from ignite.engine import Engine

from shardplug_ignite.lengths import Loader
from shardplug_ignite.positions import SavedRun


def first_iterations(engine: Engine) -> int:
    """Count the iterations that the first epoch of a run begins after, as the engine will."""
    state, given = engine.state, engine._init_iter  # noqa: SLF001  # there is no other word of it
    if given is not None:
        return int(given)
    length = state.epoch_length
    return int(state.iteration if length is None else state.iteration % length)


def skip_iterations(engine: Engine, loader: Loader, steps: int | None) -> None:
    """Go on inside an epoch by the count of an engine whose state alone was loaded."""
    done = first_iterations(engine)
    position = loader.state_dict()
    if not done or steps != engine.state.epoch_length or position["unit"] != "samples":
        return
    consumed = loader.plan.cursor(done)
    loader.load_state_dict({**position, "epoch": engine.state.epoch, "consumed": consumed})


def remaining_steps(loader: Loader) -> int | None:
    """Count the steps of a pass that are left; None if there is no telling."""
    try:
        return loader.remaining_steps
    except TypeError:
        return None


def is_at_start(saved: SavedRun) -> bool:
    """Tell whether the loader stood at the start of an epoch."""
    position = saved.loader or {}
    return not any(position.get(name) for name in ("consumed", "extra_rows", "is_done"))


def is_divided_alike(loader: Loader, saved: SavedRun) -> bool:
    """Tell whether a pass has as many steps as it had."""
    before = None if saved.loader is None else saved.loader.get("batch_size")
    now = loader.state_dict()["batch_size"]
    return saved.num_shards == loader.shard.count and bool(before == now)


def _as_it_was(saved: SavedRun) -> tuple[int | None, int, int]:
    """Tell the epoch length, epochs and iterations of a saved run, with a full epoch as one."""
    length, done = saved.epoch_length, saved.epoch_iterations
    if length is None:
        return None, saved.epochs, done
    return length, saved.epochs + done // length, done % length


def set_limits(engine: Engine, saved: SavedRun) -> None:
    """Let a run that Ignite takes for a new one go as far as the one that was saved was to go."""
    state = engine.state
    if state.iteration > 0 or not saved.iteration:
        return
    if saved.max_iters is not None and state.max_epochs == 1:
        state.max_iters, state.max_epochs = saved.max_iters, None
    elif saved.max_epochs is not None and state.max_epochs is not None:
        state.max_epochs = max(state.max_epochs, saved.max_epochs)


def set_counts(engine: Engine, saved: SavedRun, epochs: int, done: int) -> None:
    """Let an engine count from so many epochs and iterations of the one under way."""
    state, length = engine.state, engine.state.epoch_length
    if length is not None:
        epochs, done = epochs + done // length, done % length
    state.iteration, state.epoch = saved.iteration, epochs
    is_as_it_was = (length, epochs, done) == _as_it_was(saved)
    if state.max_iters is None and length is not None and not is_as_it_was:
        state.iteration = epochs * length + done
    engine._init_iter = done  # noqa: SLF001  # an iteration count does not tell after a left epoch
