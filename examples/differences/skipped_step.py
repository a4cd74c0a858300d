"""A step that the gradient scaler skips, with a fused optimizer: does the schedule wait.

A fused optimizer looks for overflow itself, so its step() is called; accelerate takes that for a
step. The learning rate is 0.1, and halves at each real step.
"""

from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR

from proving import Sides, main

PACKAGES = ("accelerate",)


def prove() -> Sides:
    """Overflow once, in both ways."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    from shardplug import ScalerAwareOptimizer, StepSyncedScheduler

    Accelerator(cpu=True)

    def rate(optimizer_kind: Any, scheduler_kind: Any) -> str:
        weight = torch.nn.Parameter(torch.ones(2))
        inner, scaler = torch.optim.AdamW([weight], lr=0.1, fused=True), torch.amp.GradScaler("cpu")
        schedule = StepLR(inner, 1, 0.5)
        optimizer = optimizer_kind(inner, scaler=scaler)
        scheduler = scheduler_kind(schedule, [optimizer])
        scaler.scale((weight * float("inf")).sum()).backward()
        optimizer.step()
        scheduler.step()
        return f"skipped, learning rate {inner.param_groups[0]['lr']:g}"

    theirs = rate(AcceleratedOptimizer, AcceleratedScheduler)
    return Sides(theirs, rate(ScalerAwareOptimizer, StepSyncedScheduler))


if __name__ == "__main__":
    main(__doc__, PACKAGES, prove)
