"""What the strategy adds to a training step stays small, as the functions that it calls tell."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

from lightning.pytorch import Callback

import shardplug
import shardplug_lightning
from shardplug import Comm
from shardplug_lightning import ShardStrategy
from tests.integrations.lightning.ranks import Trainee, make_trainer, run_ranks, values

FIRST, LAST = 20, 60


class CountsCalls(Callback):
    """Counts the calls of this package's functions in some steps, of which nothing is special."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.split(".")[0] in NAMES:
            self.calls[f"{module}.{frame.f_code.co_name}"] += 1

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == FIRST:
            sys.setprofile(self._note)
        elif args[-1] == LAST:
            sys.setprofile(None)


NAMES = (shardplug.__name__, shardplug_lightning.__name__)


def count_calls(comm: Comm) -> Counter[str]:
    counts = CountsCalls()
    trainer = make_trainer(ShardStrategy(data_seed=1), 1, max_epochs=1, callbacks=[counts])
    trainer.fit(Trainee(), values(4 * LAST + 40, 4, shuffle=True))
    return counts.calls


def test_a_step_calls_few_functions() -> None:
    (calls,) = run_ranks(1, count_calls)
    per_step = {name: count / (LAST - FIRST) for name, count in calls.items()}
    assert per_step["shardplug_lightning.positions.mark"] == 1  # it does count them
    # DDPStrategy's step takes about two thousand calls, of which one hundredth is twenty.
    assert sum(per_step.values()) <= 20, per_step
    # A place is noted once, and loaders are looked for at the start of an epoch.
    assert per_step["shardplug_lightning.views.spot"] == 1
    assert "shardplug_lightning.positions._all_views" not in per_step
