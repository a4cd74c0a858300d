"""24 samples, 2 ranks in batches of 2: stopped after 2 steps, gone on with 3 ranks.

accelerate keeps the number of steps, which is another number of samples on 3 ranks.
"""

from collections import Counter
from typing import Any

from torch.utils.data import DataLoader

from proving import Sides, main

PACKAGES = ("accelerate",)


def prove() -> Sides:
    """Count what 2 ranks saw before and 3 ranks after the stop."""
    from accelerate.data_loader import prepare_data_loader, skip_first_batches

    from shardplug import prepare_data_loader as prepare

    user: Any = DataLoader(list(range(24)), batch_size=2)  # type: ignore[arg-type]
    before = prepare(user, num_processes=2, process_index=0)
    passing = iter(before)
    next(passing), next(passing)
    theirs, ours = Counter(range(8)), Counter(range(8))  # 2 ranks, 2 steps, 2 samples each
    for rank in range(3):
        loader = prepare_data_loader(user, num_processes=3, process_index=rank)
        theirs.update(i for batch in skip_first_batches(loader, 2) for i in batch.tolist())
        after = prepare(user, num_processes=3, process_index=rank)
        after.load_state_dict(before.state_dict())
        ours.update(i for batch in after for i in batch[: after.valid_rows].tolist())
    return Sides(*(f"{24 - len(x)} never, {max(x.values()) - 1} repeated" for x in (theirs, ours)))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
