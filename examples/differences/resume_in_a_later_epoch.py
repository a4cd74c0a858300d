"""A shuffle of 16 samples, saved in its second epoch after 1 of 8 batches: what comes then.

Both sides load what they saved in a loader that is new. The unbroken run is each side's own.
"""

from typing import Any

from torch.utils.data import DataLoader

from proving import Sides, main

PACKAGES = ("accelerate",)


def prove() -> Sides:
    """Compare what comes after loading with what the unbroken run had next."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from shardplug import ShardEngine

    config = DataLoaderConfiguration(
        use_seedable_sampler=True, use_stateful_dataloader=True, data_seed=1
    )
    accelerator, engine = Accelerator(cpu=True, dataloader_config=config), ShardEngine(data_seed=1)

    def told(side: Any) -> str:
        first, again = (
            side.prepare(DataLoader(list(range(16)), 2, shuffle=True))  # type: ignore[arg-type]
            for _ in range(2)
        )
        list(first)
        passing = iter(first)
        next(passing)
        state = first.state_dict()
        rest = [batch.tolist() for batch in passing]
        again.load_state_dict(state)
        went_on = [batch.tolist() for batch in again]
        return "the same" if went_on == rest else f"{went_on[0]} instead of {rest[0]}"

    return Sides(told(accelerator), told(engine))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
