"""Hygiene for every test: what a test changes in the process, it leaves as it was."""

from __future__ import annotations

import gc
import os
import random
import threading
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import sympy  # noqa: F401  # edits the warning filters when torch first imports it
import torch
import torch.distributed as dist
from hypothesis import settings

settings.register_profile("dev", max_examples=50, deadline=None)
settings.register_profile("ci", max_examples=200, deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Kept for the life of the process by tqdm, which Lightning and Ignite draw their bars with.
THREADS_OF_LIBRARIES = {"tqdm_monitor"}
LEAVE_S = 5.0  # how long a thread that has been told to end may take


@pytest.fixture(autouse=True)
def same_random_state_afterwards() -> Iterator[None]:
    """Start every test from the same seeds and give the states of before back."""
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed notes a stack for each accelerator
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(torch_cpu)


@pytest.fixture(autouse=True)
def same_environment_afterwards() -> Iterator[None]:
    """Restore the environment; torch and Lightning set variables on import and in a Trainer."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def same_warning_filters_afterwards() -> Iterator[None]:
    """Fail a test that edits the process-wide warning filters."""
    before = list(warnings.filters)
    yield
    assert list(warnings.filters) == before, "warning filters left changed"


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    """Fail a test that leaves a thread running."""
    before = set(threading.enumerate())
    yield
    left = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name not in THREADS_OF_LIBRARIES
    ]
    if left:
        gc.collect()  # what would end them may be part of a cycle
    for thread in left:
        thread.join(LEAVE_S)
    alive = [thread.name for thread in left if thread.is_alive()]
    assert not alive, f"threads left running: {alive}"


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """Fail a test that leaves torch.distributed initialised in the test process, and end it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the default process group was left initialised")
