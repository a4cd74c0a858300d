"""An Ignite training on a shuffle of 24 samples, stopped in its epoch at step 2: what comes then.

Both engines load the state that they saved. Ignite's goes on with the number of iterations, and
the data starts over; its DeterministicEngine, which lists all batches, goes on with the data.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader

from proving import Sides, main

PACKAGES = ("pytorch-ignite",)


def train(state: dict[str, Any] | None, handler: Any) -> tuple[list[int], dict[str, Any]]:
    """Train: without a state for two steps, with one to the end of the epoch."""
    from ignite.engine import Engine, Events

    seen: list[int] = []
    trainer = Engine(lambda _, batch: seen.extend(batch.tolist()))
    if handler is not None:
        handler.attach(trainer)
    saved = trainer if handler is None else handler
    loader: DataLoader = DataLoader(list(range(24)), 4, shuffle=True)  # type: ignore[arg-type]
    if state is None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=2), trainer.interrupt)
        trainer.run(loader, max_epochs=1)
        return seen, dict(saved.state_dict())
    saved.load_state_dict(state)
    trainer.run(loader, max_epochs=1)
    return seen, {}


def prove() -> Sides:
    """Stop at step 2 of 6, go on to the end of the epoch, and count."""
    from shardplug_ignite import ShardHandler

    def told(make: Any) -> str:
        torch.manual_seed(0)
        seen, state = train(None, make())
        seen += train(state, make())[0]
        twice = len(seen) - len(set(seen))
        return f"{twice} of 24 twice, {24 - len(set(seen))} never"

    return Sides(told(lambda: None), told(lambda: ShardHandler(data_seed=0)))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
