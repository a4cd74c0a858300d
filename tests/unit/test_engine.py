"""`ShardEngine`: what it knows of the run, what it prepares, and what its options reach."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Sampler

from shardplug import (
    Comm,
    CommError,
    DataLoaderShard,
    PlanError,
    ScalerAwareOptimizer,
    Shard,
    ShardEngine,
    StepSyncedScheduler,
)
from shardplug.testing import LockstepComm, run_ranks

Batches = list[list[int]]


def loader_over(num_samples: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    samples: Any = torch.arange(num_samples)
    return DataLoader(samples, batch_size=batch_size, **options)


def batches_of(loader: Iterable[torch.Tensor]) -> Batches:
    return [batch.tolist() for batch in loader]


def prepared_on(
    world_size: int,
    num_samples: int,
    batch_size: int = 2,
    *,
    for_this_one: dict[str, Any] | None = None,
    loader_options: dict[str, Any] | None = None,
    **options: Any,
) -> list[Batches]:
    """What each rank gets in one pass."""

    def body(comm: LockstepComm) -> Batches:
        loader = loader_over(num_samples, batch_size, **(loader_options or {}))
        engine = ShardEngine(comm=comm, **options)
        return batches_of(engine.prepare_loader(loader, **(for_this_one or {})))

    return run_ranks(world_size, body)


def shuffled(num_samples: int, seed: int) -> list[int]:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed)).tolist()


# Alone.


def test_alone_it_is_rank_0_of_1_and_reads_everything() -> None:
    engine = ShardEngine()
    assert (engine.rank, engine.world_size, engine.is_main) == (0, 1, True)
    assert engine.shard == Shard(0, 1)
    assert batches_of(engine.prepare(loader_over(5))) == [[0, 1], [2, 3], [4]]


def test_alone_no_process_group_is_started() -> None:
    ShardEngine()
    assert not dist.is_initialized()


def test_with_ranks_of_its_own_it_ignores_what_a_launcher_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    assert run_ranks(1, lambda comm: ShardEngine(comm=comm).world_size) == [1]
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is the CPU only without CUDA")
def test_its_device_is_where_batches_go() -> None:
    engine = ShardEngine()
    assert engine.device == torch.device("cpu")
    (batch,) = engine.prepare(loader_over(2))
    assert batch.device == engine.device


def test_an_epoch_follows_the_seed_and_the_number_of_the_pass() -> None:
    loader = ShardEngine(data_seed=7).prepare(loader_over(6, shuffle=True))
    for epoch in range(3):
        order = shuffled(6, 7 + epoch)
        assert batches_of(loader) == [order[:2], order[2:4], order[4:]]


# On many ranks.


def test_every_rank_knows_its_place() -> None:
    def body(comm: Comm) -> tuple[int, int, Shard, bool]:
        engine = ShardEngine(comm=comm)
        return engine.rank, engine.world_size, engine.shard, engine.is_main

    assert run_ranks(3, body) == [
        (0, 3, Shard(0, 3), True),
        (1, 3, Shard(1, 3), False),
        (2, 3, Shard(2, 3), False),
    ]


def test_the_ranks_together_read_each_sample_once() -> None:
    seen = prepared_on(2, 16, data_seed=3, loader_options={"shuffle": True})
    order = shuffled(16, 3)
    assert seen == [
        [order[0:2], order[4:6], order[8:10], order[12:14]],
        [order[2:4], order[6:8], order[10:12], order[14:16]],
    ]


@dataclass(frozen=True)
class Mesh:
    """What is asked of a DeviceMesh: here dp × tp, in the order given."""

    mesh_dim_names: tuple[str, ...]
    rank: int
    shape: tuple[int, ...] = (2, 2)

    def get_coordinate(self) -> list[int]:
        return list(divmod(self.rank, 2))


def read_on_mesh(axes: tuple[str, ...], **options: Any) -> list[Batches]:
    def body(comm: LockstepComm) -> Batches:
        engine = ShardEngine(comm=comm, torch_device_mesh=Mesh(axes, comm.rank), **options)
        return batches_of(engine.prepare(loader_over(8)))

    return run_ranks(4, body)


FIRST, SECOND = [[0, 1], [4, 5]], [[2, 3], [6, 7]]


def test_ranks_that_differ_in_model_axes_read_the_same() -> None:
    assert read_on_mesh(("dp", "tp")) == [FIRST, FIRST, SECOND, SECOND]
    assert read_on_mesh(("tp", "dp")) == [FIRST, SECOND, FIRST, SECOND]


def test_data_axes_name_what_the_names_do_not_tell() -> None:
    rows = read_on_mesh(("rows", "columns"), data_axes=("rows",))
    assert rows == [FIRST, FIRST, SECOND, SECOND]
    with pytest.raises(PlanError, match=r"rows.*data_axes"):
        read_on_mesh(("rows", "columns"))


# Options.


EVEN = [[[0, 1], [4, 0]], [[2, 3], [1, 2]]]
CASES: dict[str, tuple[dict[str, Any], list[Batches]]] = {
    "by default ranks take equal numbers of full steps": ({}, EVEN),
    "even_batches=False": ({"even_batches": False}, [[[0, 1], [4]], [[2, 3]]]),
    "tail=drop": ({"tail": "drop"}, [[[0, 1]], [[2, 3]]]),
    "tail=exact": ({"tail": "exact"}, [[[0, 1], [3]], [[2], [4]]]),
    "tail wins": ({"tail": "pad", "even_batches": False}, EVEN),
    "split_batches": ({"split_batches": True}, [[[0], [2], [4]], [[1], [3], [0]]]),
}


@pytest.mark.parametrize(("options", "expected"), CASES.values(), ids=CASES)
def test_options_reach_the_loaders(options: dict[str, Any], expected: list[Batches]) -> None:
    assert prepared_on(2, 5, **options) == expected


@pytest.mark.parametrize(("options", "expected"), CASES.values(), ids=CASES)
def test_options_of_a_loader_win(options: dict[str, Any], expected: list[Batches]) -> None:
    other = {"split_batches": False, "even_batches": True, "tail": None, **options}
    assert (
        prepared_on(2, 5, for_this_one=other, tail="uneven", split_batches=True, data_seed=1)
        == expected
    )


def test_loaders_of_one_engine_differ_where_their_options_do() -> None:
    def body(comm: LockstepComm) -> tuple[Batches, Batches]:
        engine = ShardEngine(comm=comm, data_seed=0)
        train = engine.prepare(loader_over(5))
        validate = engine.prepare_loader(loader_over(5), tail="exact")
        return batches_of(train), batches_of(validate)

    assert run_ranks(2, body) == [
        ([[0, 1], [4, 0]], [[0, 1], [3]]),
        ([[2, 3], [1, 2]], [[2], [4]]),
    ]


def test_a_loader_takes_options_that_the_engine_has_not() -> None:
    everything = [[0, 1], [2, 3], [4]]
    seen = prepared_on(2, 5, for_this_one={"already_sharded": True, "tail": "uneven"})
    assert seen == [everything, everything]


def test_the_seed_is_data_seed_then_that_of_the_users_generator_then_of_torch() -> None:
    def order(num_samples: int, generator: torch.Generator | None, **options: Any) -> list[int]:
        loader = loader_over(num_samples, num_samples, shuffle=True, generator=generator)
        ((seen,),) = (batches_of(ShardEngine(**options).prepare(loader)),)
        return seen

    generator = torch.Generator().manual_seed(11)
    assert order(20, generator, data_seed=12) == shuffled(20, 12)
    assert order(20, generator) == shuffled(20, 11)
    assert order(20, None) == shuffled(20, torch.initial_seed())


def test_without_a_seedable_sampler_the_seed_is_drawn() -> None:
    torch.manual_seed(5)
    drawn = int(torch.randint(2**62, (), dtype=torch.int64).item())
    torch.manual_seed(5)
    engine = ShardEngine(use_seedable_sampler=False)
    loader = engine.prepare(loader_over(20, 20, shuffle=True))
    assert batches_of(loader) == [shuffled(20, drawn)]


class Drawing(Sampler[int]):
    """A sampler of the user's own that draws from a generator."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.num_samples, generator=self.generator).tolist()

    def __len__(self) -> int:
        return self.num_samples


def read_drawing(comm: LockstepComm, rng_types: Sequence[str] | None) -> Batches:
    loader = loader_over(8, sampler=Drawing(8, seed=comm.rank))
    return batches_of(ShardEngine(comm=comm, rng_types=rng_types, data_seed=0).prepare(loader))


def test_rng_types_make_the_generators_of_the_ranks_equal() -> None:
    order = shuffled(8, 0)
    assert run_ranks(2, read_drawing, ("generator",)) == [
        [order[0:2], order[4:6]],
        [order[2:4], order[6:8]],
    ]


@pytest.mark.parametrize("rng_types", [None, ()])
def test_without_rng_types_orders_that_differ_are_an_error(rng_types: Any) -> None:
    with pytest.raises(CommError, match=r"disagree on .*order of the loader over Drawing"):
        run_ranks(2, read_drawing, rng_types)


def test_the_list_of_rng_types_stays_the_callers() -> None:
    rng_types = ["generator"]
    engine = ShardEngine(rng_types=rng_types)
    batches_of(engine.prepare(loader_over(4)))
    assert rng_types == ["generator"]


class Movable:
    """A batch that says how it was asked to move."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def to(self, device: torch.device, non_blocking: bool = False) -> tuple[str, bool]:
        return str(device), non_blocking


@pytest.mark.parametrize("non_blocking", [False, True])
def test_non_blocking_reaches_the_move(non_blocking: bool) -> None:
    engine = ShardEngine(non_blocking=non_blocking)
    loader = loader_over(2, collate_fn=Movable)
    assert list(engine.prepare_loader(loader, device="cpu")) == [("cpu", non_blocking)]


def test_a_loader_can_have_a_device_of_its_own_or_stay_where_it_is() -> None:
    engine = ShardEngine()
    (moved,) = engine.prepare_loader(loader_over(2), device="meta")
    assert moved.device.type == "meta"
    (left,) = engine.prepare_loader(loader_over(2), device="meta", put_on_device=False)
    assert left.device.type == "cpu"


# Preparing.


def test_objects_come_back_in_order_and_modules_as_they_are() -> None:
    model, other = torch.nn.Linear(2, 1), torch.nn.ReLU()
    first, same, second, as_it_was = ShardEngine().prepare(
        loader_over(4), model, loader_over(2), other
    )
    assert same is model
    assert as_it_was is other
    assert batches_of(first) == [[0, 1], [2, 3]]
    assert batches_of(second) == [[0, 1]]


def test_one_object_comes_back_alone_and_none_as_an_empty_tuple() -> None:
    engine = ShardEngine()
    assert isinstance(engine.prepare(loader_over(4)), DataLoaderShard)
    model = torch.nn.Linear(2, 1)
    assert engine.prepare(model) is model
    assert engine.prepare() == ()


def test_the_users_loader_stays_as_it_was() -> None:
    loader = loader_over(5)
    before = dict(vars(loader))
    for prepared in run_ranks(2, lambda comm: ShardEngine(comm=comm).prepare(loader)):
        assert prepared is not loader
    assert vars(loader) == before
    assert batches_of(loader) == [[0, 1], [2, 3], [4]]


# Two engines.


def test_two_engines_do_not_see_each_other() -> None:
    def body(comm: LockstepComm) -> tuple[list[int], Batches, Batches]:
        shared, alone = ShardEngine(comm=comm, tail="drop"), ShardEngine(data_seed=3)
        mine = shared.prepare(loader_over(9))
        everything = alone.prepare(loader_over(4, shuffle=True))
        seen: tuple[Batches, Batches] = ([], [])
        for one, other in zip(mine, everything, strict=True):
            seen[0].append(one.tolist())
            seen[1].append(other.tolist())
        return [shared.world_size, alone.world_size, mine.epoch, everything.epoch], *seen

    order = shuffled(4, 3)
    everything = [order[:2], order[2:]]
    assert run_ranks(2, body) == [
        ([2, 1, 1, 1], [[0, 1], [4, 5]], everything),
        ([2, 1, 1, 1], [[2, 3], [6, 7]], everything),
    ]


def test_an_epoch_set_on_one_engines_loader_leaves_the_others_alone() -> None:
    source = loader_over(6, shuffle=True)
    one, other = (ShardEngine(data_seed=3).prepare(source) for _ in range(2))
    one.set_epoch(4)
    assert batches_of(one) == [shuffled(6, 7)[i : i + 2] for i in (0, 2, 4)]
    assert batches_of(other) == [shuffled(6, 3)[i : i + 2] for i in (0, 2, 4)]


# Errors.


class Like:
    """Has what a scaler has."""

    scale = step = update = None

    def __repr__(self) -> str:
        return "Like()"


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "tail": (
        lambda: ShardEngine(tail="even"),
        r"`tail` must be one of .*'pad'.*'exact'.*, got 'even'\.",
    ),
    "rng_types": (
        lambda: ShardEngine(rng_types=("torch", "dice")),
        r"`rng_types` must be among .*'torch'.*, got 'dice'\.",
    ),
    "tail of a loader": (
        lambda: ShardEngine().prepare_loader(loader_over(4), tail="even"),
        r"`tail` must be one of .*, got 'even'\.",
    ),
    "rng_types of a loader": (
        lambda: ShardEngine().prepare_loader(loader_over(4), rng_types=["dice"]),
        r"`rng_types` must be among .*, got 'dice'\.",
    ),
    "a window that is no integer": (
        lambda: ShardEngine(gradient_accumulation_steps=1.5),  # type: ignore[arg-type]
        r"`gradient_accumulation_steps` must be an integer, got 1\.5\.",
    ),
    "a window of a truth value": (
        lambda: ShardEngine(gradient_accumulation_steps=True),
        r"`gradient_accumulation_steps` must be an integer, got True\.",
    ),
    "no scaler": (
        lambda: ShardEngine(scaler=5),  # type: ignore[arg-type]
        r"`scaler` must be a torch\.amp\.GradScaler or None, got 5\.",
    ),
    "a flag of a loader": (
        lambda: ShardEngine().prepare_loader(loader_over(4), put_on_device="no"),
        r"`put_on_device` must be True or False, got 'no'\.",
    ),
    "no scaler but like one": (
        lambda: ShardEngine(scaler=Like()),  # type: ignore[arg-type]
        r"`scaler` must be a torch\.amp\.GradScaler or None, got Like\(\)\.",
    ),
    "no loader": (
        lambda: ShardEngine().prepare_loader([[0, 1]]),  # type: ignore[arg-type]
        r"`dataloader` must be a .*DataLoader, got list\.",
    ),
    "an object of another kind": (
        lambda: ShardEngine().prepare(loader_over(4), {"lr": 0.1}),
        r"`objects` must be .*, got dict as number 2\.",
    ),
    "data_axes without a mesh": (
        lambda: ShardEngine(data_axes=("dp",)),
        r"`data_axes` must come with a mesh, got \('dp',\) without one\.",
    ),
    "None": (
        lambda: ShardEngine().prepare(None),
        r"`objects` must be .*, got NoneType as number 1\.",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_errors_name_the_argument_the_rule_and_the_value(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        call()


def test_nothing_is_prepared_when_one_object_does_not_fit() -> None:
    def body(comm: LockstepComm) -> list[Any]:
        engine = ShardEngine(comm=comm)
        before = list(comm.calls)
        with pytest.raises(PlanError, match="got str as number 2"):
            engine.prepare(loader_over(4), "optimizer")
        return comm.calls[len(before) :]

    assert run_ranks(2, body) == [[], []]


def test_nothing_is_prepared_when_a_loader_cannot_be() -> None:
    engine, optimizer = ShardEngine(), descent(one_weight())
    good, bad = loader_over(4), loader_over(4, num_workers=1, in_order=False)
    with pytest.raises(PlanError, match="`in_order` must be True"):
        engine.prepare(optimizer, halving(optimizer), good, bad)
    assert engine.state_dict()["loaders"] == []
    prepared, _ = engine.prepare(optimizer, good)
    assert prepared.optimizer is optimizer


def test_batches_that_cannot_be_split_are_an_error_on_every_rank() -> None:
    def body(comm: LockstepComm) -> str:
        engine = ShardEngine(comm=comm, split_batches=True)
        with pytest.raises(PlanError, match="multiple of") as caught:
            engine.prepare(loader_over(8, batch_size=3))
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert "got 3" in first


def test_loaders_that_differ_are_an_error_on_every_rank() -> None:
    def body(comm: LockstepComm) -> None:
        with pytest.raises(CommError, match="rank 0 has 8, rank 1 has 9"):
            ShardEngine(comm=comm).prepare(loader_over(8 + comm.rank))

    run_ranks(2, body)


# Optimizers and schedules.


def one_weight(value: float = 0.0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(value))


def descent(weight: torch.nn.Parameter, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD([weight], lr=lr)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)


def test_a_schedule_may_come_before_its_optimizer() -> None:
    weight = one_weight()
    optimizer = descent(weight)
    schedule, wrapped = ShardEngine().prepare(halving(optimizer), optimizer)
    assert isinstance(schedule, StepSyncedScheduler)
    assert isinstance(wrapped, ScalerAwareOptimizer)
    schedule.step()  # there was no step yet
    assert wrapped.param_groups[0]["lr"] == 1.0
    weight.grad = torch.ones(())
    wrapped.step()
    schedule.step()
    assert wrapped.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(("unit", "rate"), [("updates", 0.5), ("batches", 0.25)])
def test_scheduler_unit_says_what_a_schedule_counts(unit: Any, rate: float) -> None:
    def body(comm: LockstepComm) -> float:
        weight = one_weight()
        optimizer = descent(weight)
        engine = ShardEngine(comm=comm, scheduler_unit=unit)
        optimizer, schedule = engine.prepare(optimizer, halving(optimizer))
        weight.grad = torch.ones(())
        optimizer.step()
        schedule.step()
        found: float = optimizer.param_groups[0]["lr"]
        return found

    assert run_ranks(2, body) == [rate, rate]


def test_a_scaler_scales_losses_and_skips_what_overflows() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    weight = one_weight()
    engine = ShardEngine(scaler=scaler)
    optimizer = engine.prepare(descent(weight))
    for factor, after in ((3.0, -3.0), (float("inf"), -3.0), (1.0, -4.0)):
        optimizer.zero_grad()
        engine.backward(weight * factor)
        optimizer.step()
        assert weight.item() == after
    assert (optimizer.outcome.num_windows, optimizer.outcome.num_steps) == (3, 2)
    assert scaler.get_scale() == 2.0


def test_windows_step_once_and_the_last_one_even_if_it_is_short() -> None:
    weight = one_weight()
    engine = ShardEngine(gradient_accumulation_steps=2)
    loader, optimizer = engine.prepare(loader_over(5, 1), descent(weight))
    weights = []
    for batch in loader:
        with engine.accumulate():
            engine.backward(weight * batch.float().mean())
            optimizer.step()
            optimizer.zero_grad()
        weights.append(weight.item())
    # Gradients are the means over windows: (0+1)/2, (2+3)/2, 4.
    assert weights == [0.0, -0.5, -0.5, -3.0, -7.0]


def test_a_step_within_another_engines_window_follows_its_own_engine_only() -> None:
    mine, others = one_weight(), one_weight()
    engine, other = ShardEngine(gradient_accumulation_steps=2), ShardEngine()
    optimizer, loader = engine.prepare(descent(mine), loader_over(4, 1))
    guest = other.prepare(descent(others))
    seen = []
    for batch in loader:
        with engine.accumulate():
            engine.backward(mine * batch.float().mean())
            other.backward(others * batch.float().mean())
            for each in (optimizer, guest):
                each.step()
                each.zero_grad()
        seen.append((mine.item(), others.item()))
    # Rows 0, 1, 2, 3: means of 0.5 and 2.5 for windows of two, each row by itself for the guest.
    assert seen == [(0, 0), (-0.5, -1), (-0.5, -3), (-3, -6)]


def test_windows_of_two_engines_may_lie_within_each_other() -> None:
    mine, others = one_weight(), one_weight()
    engine, other = (ShardEngine(gradient_accumulation_steps=steps) for steps in (2, 3))
    optimizer, loader = engine.prepare(descent(mine), loader_over(4, 1))
    guest, its_loader = other.prepare(descent(others), loader_over(4, 1))
    seen = []
    for batch, its_batch in zip(loader, its_loader, strict=True):
        with engine.accumulate(), other.accumulate():
            engine.backward(mine * batch.float().mean())
            other.backward(others * its_batch.float().mean())
            for each in (guest, optimizer):
                each.step()
                each.zero_grad()
        seen.append((mine.item(), others.item()))
    # The guest's windows are rows 0 to 2, of mean 1, and row 3 alone.
    assert seen == [(0, 0), (-0.5, 0), (-0.5, -1), (-3, -4)]


def test_valid_rows_weigh_a_padded_window_as_the_big_batch() -> None:
    """Over 2 ranks, 5 samples in batches of 2: padding weighs nothing, a short batch its rows."""

    def body(comm: LockstepComm) -> float:
        weight = one_weight()
        engine = ShardEngine(comm=comm, gradient_accumulation_steps=2)
        loader = engine.prepare(loader_over(5))
        for batch in loader:
            with engine.accumulate():
                rows = batch[: loader.valid_rows].float()
                loss = rows.mean() if len(rows) else torch.zeros(())
                engine.backward(weight * loss, valid_rows=loader.valid_rows)
        assert weight.grad is not None
        return weight.grad.item()

    assert sum(run_ranks(2, body)) / 2 == pytest.approx((0 + 1 + 2 + 3 + 4) / 5)


def test_gradients_are_clipped_after_they_are_unscaled() -> None:
    weight = one_weight()
    engine = ShardEngine(scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    optimizer = engine.prepare(descent(weight))
    engine.backward(weight * 3)
    assert engine.clip_grad_norm_([weight], 1.5).item() == 3.0
    optimizer.step()
    assert weight.item() == pytest.approx(-1.5, rel=1e-5)


def test_metrics_are_gathered_without_padding_from_the_loop_under_way() -> None:
    def body(comm: LockstepComm) -> list[list[int]]:
        engine = ShardEngine(comm=comm)
        loader = engine.prepare(loader_over(5))
        return [engine.gather_for_metrics(batch).tolist() for batch in loader]

    assert run_ranks(2, body) == [[[0, 1, 2, 3], [4]]] * 2


def test_what_is_gathered_by_hand_is_everything() -> None:
    def body(comm: LockstepComm) -> list[int]:
        gathered: torch.Tensor = ShardEngine(comm=comm).gather(torch.tensor([comm.rank]))
        return gathered.tolist()

    assert run_ranks(3, body) == [[0, 1, 2]] * 3


def prepare_twice() -> None:
    engine, optimizer = ShardEngine(), descent(one_weight())
    engine.prepare(optimizer)
    engine.prepare(loader_over(2), optimizer)


def prepare_one_twice_at_once() -> None:
    optimizer = descent(one_weight())
    ShardEngine().prepare(optimizer, optimizer)


def prepare_a_schedule_twice() -> None:
    engine, optimizer = ShardEngine(), descent(one_weight())
    schedule = halving(optimizer)
    engine.prepare(optimizer, schedule)
    engine.prepare(schedule)


def prepare_a_prepared_schedule() -> None:
    engine, optimizer = ShardEngine(), descent(one_weight())
    _, schedule = engine.prepare(optimizer, halving(optimizer))
    engine.prepare(loader_over(2), schedule)


def prepare_a_prepared_one() -> None:
    engine = ShardEngine()
    engine.prepare(engine.prepare(descent(one_weight())))


def accumulate_over_another_engines_loader() -> None:
    loader = ShardEngine().prepare(loader_over(2))
    with ShardEngine().accumulate(loader=loader):
        pass


def accumulate_outside_of_a_loop() -> None:
    with ShardEngine().accumulate():
        pass


WRONG_STEPS: dict[str, tuple[Callable[[], Any], str]] = {
    "accumulation": (
        lambda: ShardEngine(gradient_accumulation_steps=0),
        r"`gradient_accumulation_steps` must be at least 1, got 0",
    ),
    "unit": (
        lambda: ShardEngine(scheduler_unit="epochs"),  # type: ignore[arg-type]
        r"`scheduler_unit` must be 'batches' or 'updates', got 'epochs'\.",
    ),
    "an optimizer twice": (prepare_twice, r"not prepared yet, got SGD as number 2"),
    "an optimizer twice at once": (prepare_one_twice_at_once, r"not prepared yet, got SGD .*ber 2"),
    "a schedule twice": (
        prepare_a_schedule_twice,
        r"`objects` must hold schedules that are not prepared yet, got StepLR as number 1, which",
    ),
    "a prepared schedule": (prepare_a_prepared_schedule, r"not prepared yet, got StepS.*number 2"),
    "a class": (
        lambda: ShardEngine().prepare(torch.optim.SGD),
        r"`objects` must be .*modules, got the class SGD as number 1\.",
    ),
    "a prepared optimizer": (prepare_a_prepared_one, r"not prepared yet, got .*number 1"),
    "a schedule alone": (
        lambda: ShardEngine().prepare(halving(descent(one_weight()))),
        r"schedules of prepared optimizers, got StepLR as number 1",
    ),
    "another's loader": (
        accumulate_over_another_engines_loader,
        r"`loader` must be one that this engine has prepared, got another\.",
    ),
    "no loop": (accumulate_outside_of_a_loop, r"`accumulate` must be entered in the loop"),
    "no loop to gather in": (
        lambda: ShardEngine().gather_for_metrics(torch.ones(1)),
        r"`gather_for_metrics` must be called in the loop over a prepared loader",
    ),
    "rows without a window": (
        lambda: ShardEngine().backward(one_weight() * 2, valid_rows=1),
        r"`valid_rows` must come with a window, got 1 outside of accumulate\(\)\.",
    ),
}


@pytest.mark.parametrize(("call", "message"), WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_errors_of_steps_name_the_argument_the_rule_and_the_value(
    call: Callable[[], Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        call()
