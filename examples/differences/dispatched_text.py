"""A batch with text in it, read by rank 0 for 2 ranks: what rank 1 receives."""

from typing import Any

from torch.utils.data import DataLoader

from proving import Sides, main, on_ranks

PACKAGES = ("accelerate",)


def receive(rank: int) -> list[str]:
    """Receive the first batch, ours first: after an error ranks are out of step."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from shardplug import ShardEngine

    config = DataLoaderConfiguration(dispatch_batches=True)
    found = []
    for side in (
        ShardEngine(dispatch_batches=True),
        Accelerator(cpu=True, dataloader_config=config),
    ):
        rows = [{"id": i, "name": f"number {i}"} for i in range(8)]
        user: Any = DataLoader(rows, 2)  # type: ignore[arg-type]
        try:
            found.append(str(next(iter(side.prepare(user)))["name"]))
        except Exception as error:  # noqa: BLE001  # it is what is shown
            found.append(type(error).__name__)
    return found


def prove() -> Sides:
    """Show what rank 0, which reads, and rank 1 came to."""
    (ours, theirs), (ours_1, theirs_1) = on_ranks(2, receive, group_s=5.0)
    return Sides(f"rank 0 {theirs}, rank 1 {theirs_1}", f"rank 0 {ours}, rank 1 {ours_1}")


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
