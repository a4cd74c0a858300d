"""What a strategy can be told: checked at construction, and kept through pickling and configs."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, Strategy, StrategyRegistry

from shardplug import PlanError, ShardplugError, slice_tensors
from shardplug_lightning import (
    OptionError,
    ShardFSDPStrategy,
    ShardModelParallelStrategy,
    ShardOptions,
    ShardSingleDeviceStrategy,
    ShardStrategy,
    register,
)
from shardplug_lightning.mixin import check_lengths


def make_strategy(options: dict[str, Any]) -> ShardStrategy:
    return ShardStrategy(**options)


def test_a_misspelt_option_is_an_error_at_construction() -> None:
    with pytest.raises(OptionError) as caught:
        ShardStrategy(seeed=3)
    assert str(caught.value) == (
        "`seeed` must be an option of ShardStrategy or of what it is built on, got a name that "
        "none of them has. Did you mean `data_seed`? Its own options are split_batches, "
        "even_batches, tail, evaluation_tail, use_seedable_sampler, data_seed, rng_types, "
        "dispatch_batches, slice_fn_for_dispatch, use_stateful_dataloader, already_sharded, "
        "sync_order, worker_split, batches_per_message, seed_samples."
    )
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ShardplugError)
    DDPStrategy(seeed=3)  # which torch would refuse once the processes have started


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("tial", "tail"),
        ("find_unused_paramters", "find_unused_parameters"),  # of DistributedDataParallel
        ("start_methd", "start_method"),  # of DDPStrategy
        ("device_id", "device_mesh"),  # not device_ids, which Lightning fills in
    ],
)
def test_the_error_suggests_what_was_meant(misspelt: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"Did you mean `{meant}`"):
        make_strategy({misspelt: None})


@pytest.mark.parametrize("name", ["module", "device_ids"])
def test_what_lightning_fills_in_cannot_be_given(name: str) -> None:
    with pytest.raises(OptionError, match=f"`{name}` must be an option"):
        make_strategy({name: None})


def test_options_of_ddp_are_passed_on() -> None:
    strategy = ShardStrategy(start_method="fork", bucket_cap_mb=3, process_group_backend="gloo")
    assert strategy._ddp_kwargs == {"bucket_cap_mb": 3}
    assert strategy._start_method == "fork"
    assert strategy.process_group_backend == "gloo"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split_batches": 1}, "`split_batches` must be True or False, got 1."),
        ({"even_batches": "no"}, "`even_batches` must be True or False, got 'no'."),
        (
            {"use_seedable_sampler": 0},
            "`use_seedable_sampler` must be True, False or None, got 0.",
        ),
        ({"tail": "padd"}, "`tail` must be one of 'pad', 'drop', 'exact' or None, got 'padd'."),
        ({"tail": 3}, "`tail` must be one of 'pad', 'drop', 'exact' or None, got 3."),
        (
            {"tail": "uneven"},
            "`tail` must be one of 'pad', 'drop', 'exact', got 'uneven': ranks that train for "
            "different numbers of steps wait for each other for ever.",
        ),
        (
            {"evaluation_tail": None},
            "`evaluation_tail` must be one of 'pad', 'drop', 'uneven', 'exact', got None.",
        ),
        ({"data_seed": "1"}, "`data_seed` must be an integer or None, got '1'."),
        ({"data_seed": True}, "`data_seed` must be an integer or None, got True."),
        (
            {"data_seed": 1, "use_seedable_sampler": False},
            "`data_seed` must be left out with use_seedable_sampler=False, got 1. Pass "
            "use_seedable_sampler=True, or leave that out too.",
        ),
        (
            {"rng_types": "torch"},
            "`rng_types` must be a sequence of names, got 'torch'. Pass rng_types=('torch',).",
        ),
        ({"rng_types": 1}, "`rng_types` must be a sequence of names or None, got 1."),
        (
            {"dispatch_batches": "yes"},
            "`dispatch_batches` must be True, False or None, got 'yes'.",
        ),
        (
            {"slice_fn_for_dispatch": 3},
            "`slice_fn_for_dispatch` must be a function or None, got 3.",
        ),
        (
            {"use_stateful_dataloader": None},
            "`use_stateful_dataloader` must be True or False, got None.",
        ),
        ({"already_sharded": "x"}, "`already_sharded` must be True, False or None, got 'x'."),
        ({"sync_order": "none"}, '`sync_order` must be "agree" or "broadcast", got \'none\'.'),
        (
            {"worker_split": 2},
            "`worker_split` must be one of 'auto', 'shardplug', 'dataset', got 2.",
        ),
        (
            {"batches_per_message": 0},
            "`batches_per_message` must be at least 1, got 0.",
        ),
        (
            {"batches_per_message": True},
            "`batches_per_message` must be an integer, got True.",
        ),
        ({"seed_samples": 1}, "`seed_samples` must be True or False, got 1."),
    ],
)
def test_a_value_of_a_wrong_kind_is_an_error_at_construction(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        make_strategy(options)
    assert str(caught.value) == message


def test_options_are_by_keyword_only() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        ShardStrategy(True)  # type: ignore[call-arg]


def test_a_strategy_pickles_for_spawn() -> None:
    strategy = ShardStrategy(data_seed=4, tail="exact", rng_types=["torch"], bucket_cap_mb=3)
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.shard_options == strategy.shard_options
    assert copy.shard_options == ShardOptions(data_seed=4, tail="exact", rng_types=["torch"])
    assert copy._ddp_kwargs == {"bucket_cap_mb": 3}


@pytest.mark.parametrize(
    ("name", "start_method"),
    [
        ("shard", "popen"),
        ("shard_spawn", "spawn"),
        ("shard_fork", "fork"),
        ("shard_notebook", "fork"),
    ],
)
def test_the_strategies_are_known_by_name(name: str, start_method: str) -> None:
    strategy = StrategyRegistry.get(name)
    assert type(strategy) is ShardStrategy
    assert strategy._start_method == start_method
    assert strategy.strategy_name == "shard"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("shard_single_device", ShardSingleDeviceStrategy),
        ("shard_fsdp", ShardFSDPStrategy),
        ("shard_fsdp_cpu_offload", ShardFSDPStrategy),
        ("shard_model_parallel", ShardModelParallelStrategy),
    ],
)
def test_their_kin_are_known_by_name_too(name: str, kind: Any) -> None:
    strategy: Any = StrategyRegistry.get(name)
    assert type(strategy) is kind
    assert name.startswith(kind.strategy_name)
    is_offloaded = getattr(strategy, "cpu_offload", None)
    assert (name == "shard_fsdp_cpu_offload") == bool(is_offloaded and is_offloaded.offload_params)


@pytest.mark.parametrize("kind", [ShardFSDPStrategy, ShardModelParallelStrategy])
def test_ranks_that_forward_in_step_cannot_be_uneven(kind: Any) -> None:
    with pytest.raises(PlanError) as caught:
        kind(evaluation_tail="uneven")
    assert str(caught.value) == (
        f"`evaluation_tail` must be 'exact', 'pad' or 'drop' for {kind.__name__}, got 'uneven': "
        "its ranks wait for each other in every step."
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ShardSingleDeviceStrategy, {"device": "cpu"}),
        (ShardFSDPStrategy, {"sharding_strategy": "NO_SHARD", "limit_all_gathers": False}),
        (ShardModelParallelStrategy, {"tensor_parallel_size": 2}),
    ],
)
def test_each_strategy_knows_its_own_keywords(kind: Any, options: dict[str, Any]) -> None:
    assert kind(**options, data_seed=3).shard_options.data_seed == 3
    with pytest.raises(OptionError, match=f"must be an option of {kind.__name__} "):
        kind(bucket_cap_mb=3)


def test_registering_leaves_names_that_are_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"strategy": object}
    monkeypatch.setitem(StrategyRegistry, "shard", mine)
    monkeypatch.delitem(StrategyRegistry, "shard_fork")
    register()
    assert StrategyRegistry["shard"] is mine
    assert type(StrategyRegistry.get("shard_fork")) is ShardStrategy


def test_registering_does_not_add_to_the_names_of_ddp() -> None:
    assert StrategyRegistry["ddp"]["strategy"] is DDPStrategy


def test_a_config_file_can_name_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of the way Lightning uses it
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Strategy, "strategy")
    chosen = {
        "data_seed": 4,
        "split_batches": True,
        "dispatch_batches": True,
        "worker_split": "dataset",
        "batches_per_message": 2,
        "seed_samples": True,
        "slice_fn_for_dispatch": "shardplug.slice_tensors",
    }
    options = {**chosen, "find_unused_parameters": True}
    config = parser.parse_object(
        {"strategy": {"class_path": "shardplug_lightning.ShardStrategy", "init_args": options}}
    )
    strategy = parser.instantiate_classes(config).strategy
    assert strategy.shard_options == ShardOptions(
        **{**chosen, "slice_fn_for_dispatch": slice_tensors}  # type: ignore[arg-type]
    )
    assert strategy._ddp_kwargs["find_unused_parameters"] is True
    wrong = {"class_path": "shardplug_lightning.ShardStrategy", "init_args": {"data_seed": "x"}}
    with pytest.raises(jsonargparse.ArgumentError, match="data_seed"):
        parser.parse_object({"strategy": wrong})


@pytest.mark.parametrize(
    ("by_rank", "is_training", "message"),
    [
        (
            [2, 2, 1],
            True,
            "`dataloader` must take the same number of steps on every rank to train, got 2 on rank "
            '0, 2 on rank 1, 1 on rank 2. Use tail="pad", tail="drop" or tail="exact".',
        ),
        (
            [1, 0],
            False,
            "`dataloader` must have a batch for every rank, got 1 on rank 0, 0 on rank 1 steps. "
            'Use evaluation_tail="exact", a smaller batch size, or fewer ranks.',
        ),
        (
            [3, -1],
            False,
            "`dataloader` must have a length on every rank or on none, got 3 on rank 0, unknown on "
            "rank 1.",
        ),
    ],
)
def test_lengths_that_would_hang_are_errors(
    by_rank: list[int], is_training: bool, message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        check_lengths(by_rank, is_training=is_training)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("by_rank", "is_training"),
    [([2, 2], True), ([0, 0], False), ([-1, -1], True), ([2, 1], False), ([5], True)],
)
def test_lengths_that_end_well_are_none(by_rank: list[int], is_training: bool) -> None:
    check_lengths(by_rank, is_training=is_training)
