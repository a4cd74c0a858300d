"""Preparing: what is refused, what is warned of, what is chosen, and what is left alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from shardplug import (
    BatchSamplerShard,
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    PermutedSampler,
    PlanError,
    SeedableRandomSampler,
    Shard,
    ShardEngine,
    ShardplugWarning,
    Tail,
    check_options,
    prepare_data_loader,
    skip_first_batches,
)
from shardplug.prepared import PreparedLoader
from tests import laws, reference
from tests.laws import Case

Batches = list[list[int]]


def loader_over(n: int = 8, batch_size: int | None = 2, **options: Any) -> DataLoader[Any]:
    samples: Any = torch.arange(n)
    if "batch_sampler" in options:
        return DataLoader(samples, **options)
    return DataLoader(samples, batch_size=batch_size, **options)


def batches_of(loader: Any) -> Batches:
    return [list(laws.ids_of(batch)) for batch in loader]


def simulated(loader: Any, world_size: int, **options: Any) -> list[PreparedLoader]:
    """The loaders of all ranks, prepared in this one."""
    return [
        prepare_data_loader(loader, num_processes=world_size, process_index=rank, **options)
        for rank in range(world_size)
    ]


class Stream(IterableDataset[int]):
    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)


# What is refused.

REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no loader": (
        [1, 2],
        {},
        "`dataloader` must be a torch.utils.data.DataLoader, got list. Wrap the data in one.",
    ),
    "no shards": (
        loader_over(),
        {"num_processes": 0},
        "`num_processes` must be at least 1, got 0.",
    ),
    "no such shard": (
        loader_over(),
        {"num_processes": 3, "process_index": 3},
        "`process_index` must be in [0, 3), got 3.",
    ),
    "indivisible": (
        loader_over(),
        {"num_processes": 3, "split_batches": True},
        "`batch_size` must be a multiple of the 3 shards when each batch is split, got 2. "
        "Use 3, or split_batches=False.",
    ),
    "nothing to split": (
        loader_over(batch_size=None),
        {"num_processes": 2, "split_batches": True},
        "`batch_size` must be set for batches to be split, got None. Pass split_batches=False.",
    ),
    "no size to split": (
        loader_over(batch_sampler=[[0, 1], [2]]),
        {"num_processes": 2, "split_batches": True},
        "`batch_sampler` must declare a `batch_size` for its batches to be split, got None. "
        "Pass split_batches=False.",
    ),
    "no such tail": (
        loader_over(),
        {"tail": "even"},
        "`tail` must be one of 'pad', 'drop', 'uneven', 'exact', got 'even'.",
    ),
    "too few to be exact": (
        loader_over(2),
        {"num_processes": 3, "tail": "exact"},
        "`num_samples` must be 0 or at least the 3 shards with tail='exact', got 2. "
        'Use fewer ranks, tail="pad" or tail="uneven".',
    ),
    "one row each, and not exact": (
        loader_over(7, 1),
        {"num_processes": 3, "tail": "exact"},
        "`num_samples` must be a multiple of the 3 shards with tail='exact' and one row per shard "
        'and step, got 7. Use a larger batch size, tail="pad" or tail="uneven".',
    ),
    "no such generator": (
        loader_over(),
        {"rng_types": ["tpu"]},
        "`rng_types` must be among 'torch', 'cuda', 'xla', 'generator', 'numpy', 'python', got "
        "'tpu'.",
    ),
    "no such order": (
        loader_over(),
        {"sync_order": "both"},
        '`sync_order` must be "agree" or "broadcast", got \'both\'.',
    ),
    "no such division": (
        loader_over(),
        {"worker_split": "half"},
        "`worker_split` must be one of 'auto', 'shardplug', 'dataset', got 'half'.",
    ),
    "empty messages": (
        loader_over(),
        {"batches_per_message": 0},
        "`batches_per_message` must be at least 1, got 0.",
    ),
    "axes without a mesh": (
        loader_over(),
        {"data_axes": ["dp"]},
        "`data_axes` must come with a mesh, got ('dp',) without one. Pass torch_device_mesh, or "
        "leave it out.",
    ),
    "out of order": (
        loader_over(num_workers=1, in_order=False),
        {},
        "`in_order` must be True for ranks to know which batch they are at, got False. "
        "Leave it out.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments_that_do_not_fit_are_refused(case: str) -> None:
    loader, options, message = REFUSED[case]
    options = {"process_index": 0, **options} if "num_processes" in options else options
    with pytest.raises(PlanError) as caught:
        prepare_data_loader(loader, **options)
    assert str(caught.value) == message


KINDS: dict[str, tuple[str, list[Any]]] = {
    **dict.fromkeys(
        (
            "split_batches",
            "put_on_device",
            "even_batches",
            "use_seedable_sampler",
            "non_blocking",
            "use_stateful_dataloader",
            "seed_samples",
        ),
        ("True or False", ["no", 1, 0, None, torch.tensor(True), np.array([True])]),
    ),
    **dict.fromkeys(
        ("dispatch_batches", "already_sharded"), ("True, False or None", ["x", 1, 0.0])
    ),
    **dict.fromkeys(
        ("num_processes", "process_index", "data_seed"),
        ("an integer or None", ["a", 1.5, True, torch.ones(2)]),
    ),
    "batches_per_message": ("an integer", ["2", 1.0, None, False]),
    "slice_fn_for_dispatch": ("a function or None", [3, "f"]),
    "comm": ("a Comm or None", [4, "gloo"]),
    "torch_device_mesh": ("a DeviceMesh or None", [4, "dp"]),
    "data_axes": ("a sequence of names", ["dp", 3, [3]]),
    "rng_types": ("a sequence of names", ["torch", 3, [3], torch.ones(2)]),
    "device": ("a torch.device, the name or number of one, or None", ["nope", 1.5, True, {}]),
    "tail": ("one of", [3, []]),
    "sync_order": ('"agree" or "broadcast"', [None, [], np.zeros(2)]),
    "worker_split": ("one of", [None, [], np.zeros(2)]),
}


OF_LOADERS: dict[str, tuple[str, list[Any]]] = {
    "skip_batches": ("an integer", ["2", 1.0, None, True]),
    "slice_fn": ("a function or None", [3, "f"]),
    "synchronized_generator": ("a torch.Generator or None", [3, "seed"]),
}


def checks_of(name: str) -> list[Callable[..., Any]]:
    """All that take an option, as functions of its value alone."""
    found: list[Callable[..., Any]] = [partial(prepare_data_loader, loader_over()), check_options]
    if name in OF_LOADERS:
        found.clear()
    if name in signature(ShardEngine).parameters:
        found.append(ShardEngine)
    ours = (DataLoaderShard, DataLoaderDispatcher)
    return found + [partial(kind, range(8)) for kind in ours if name in signature(kind).parameters]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (_, values) in (KINDS | OF_LOADERS).items() for value in values],
)
def test_a_value_of_a_wrong_kind_is_refused_wherever_it_is_given(name: str, value: Any) -> None:
    rule = (KINDS | OF_LOADERS)[name][0]
    for check in checks_of(name):
        with pytest.raises(PlanError) as caught:
            check(**{name: value})
        assert str(caught.value).startswith(f"`{name}` must be {rule}"), check
        assert f"got {value!r:.80}." in str(caught.value)


def test_the_kind_of_every_option_is_checked() -> None:
    options = {*signature(prepare_data_loader).parameters} - {"dataloader"}
    assert options == {*KINDS}
    for kind in (DataLoaderShard, DataLoaderDispatcher):
        others = {"dataset", "dataloader_kwargs"}
        assert {*signature(kind).parameters} - others <= {*KINDS, *OF_LOADERS}


def test_there_are_no_other_options_to_check() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'shuffle'"):
        check_options(shuffle=True)


def test_a_device_that_is_not_there_is_refused_where_something_is_moved_to_it() -> None:
    assert check_options(device=0) == {"device": 0}
    with pytest.raises(PlanError, match=r"`device` must be a torch\.device, the name or number"):
        prepare_data_loader(loader_over(), device=-1, put_on_device=True)
    with pytest.raises(PlanError, match=r"`device` must be a torch\.device, the name or number"):
        DataLoaderShard(range(8), device=2**70)


class Number:
    """What can be an index is a number."""

    def __index__(self) -> int:
        return 2


@pytest.mark.parametrize("two", [np.int64(2), np.uint8(2), torch.tensor(2), Number()])
def test_whatever_can_be_an_index_is_an_integer(two: Any) -> None:
    checked = check_options(num_processes=two, data_seed=two, batches_per_message=two)
    assert [type(each) for each in checked.values()] == [int] * 3
    assert {*checked.values()} == {2}
    loader = prepare_data_loader(loader_over(), num_processes=two, process_index=1)
    assert loader.shard == Shard(1, 2)


@pytest.mark.parametrize("yes", [True, np.bool_(True), np.array(True)])
def test_truth_values_may_be_numpys(yes: Any) -> None:
    checked = check_options(split_batches=yes, dispatch_batches=yes)
    assert [each is True for each in checked.values()] == [True, True]
    loader = prepare_data_loader(loader_over(), num_processes=2, process_index=1, split_batches=yes)
    assert batches_of(loader) == [[1], [3], [5], [7]]


class Place:
    """No rank of ours, but good enough to be asked where it is."""

    rank, world_size = 0, 1


def test_ranks_and_meshes_are_known_by_what_they_can_do() -> None:
    ranks = Place()
    assert check_options(comm=ranks)["comm"] is ranks
    names = {"rng_types": ("python",), "data_axes": ["dp"], "tail": Tail.DROP}
    assert check_options(**names) == names


class Own(DataLoader[Any]):
    """A user's loader, with something of its own."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.extra = ["kept"]

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            yield -batch


def test_a_subclass_cannot_be_made_stateful() -> None:
    with pytest.raises(PlanError) as caught:
        prepare_data_loader(Own(torch.arange(4)), use_stateful_dataloader=True)
    assert str(caught.value) == (
        "`dataloader` must be a plain DataLoader with use_stateful_dataloader=True, got Own: a "
        "subclass cannot be made into a stateful one. Pass a DataLoader, or leave "
        "use_stateful_dataloader out."
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"skip_batches": -1}, "`skip_batches` must be at least 0, got -1."),
        ({"batches_per_message": 0}, "`batches_per_message` must be at least 1, got 0."),
        (
            {"rng_types": ["all"]},
            "`rng_types` must be among 'torch', 'cuda', 'xla', 'generator', 'numpy', 'python', "
            "got 'all'.",
        ),
    ],
)
def test_a_loader_built_directly_refuses_what_does_not_fit(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError) as caught:
        DataLoaderShard(torch.arange(4), **options)
    assert str(caught.value) == message


@pytest.mark.parametrize("loader", [loader_over(), prepare_data_loader(loader_over())])
def test_skipping_less_than_nothing_is_refused(loader: Any) -> None:
    with pytest.raises(PlanError) as caught:
        skip_first_batches(loader, -1)
    assert str(caught.value) == "`num_batches` must be at least 0, got -1."


def test_what_is_no_loader_cannot_be_skipped() -> None:
    with pytest.raises(PlanError) as caught:
        skip_first_batches([1, 2], 1)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "`dataloader` must be a torch.utils.data.DataLoader, got list. Wrap the data in one."
    )


# What is warned of.


def slices(data: Any, tensor_slice: slice, **_: Any) -> Any:
    return data[tensor_slice]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"slice_fn_for_dispatch": slices},
            "`slice_fn_for_dispatch` has no effect without dispatch_batches=True.",
        ),
        (
            {"data_seed": 3},
            "`data_seed` has no effect without use_seedable_sampler=True.",
        ),
    ],
)
def test_an_argument_without_effect_is_warned_of_where_it_is_given(
    options: dict[str, Any], message: str
) -> None:
    with pytest.warns(ShardplugWarning) as caught:
        prepare_data_loader(loader_over(), **options)
    assert [str(warning.message) for warning in caught] == [message]
    assert [warning.filename for warning in caught] == [__file__]


def test_a_seed_of_no_effect_has_none() -> None:
    torch.manual_seed(5)
    expected = prepare_data_loader(loader_over(shuffle=True))
    torch.manual_seed(5)
    with pytest.warns(ShardplugWarning):
        loader = prepare_data_loader(loader_over(shuffle=True), data_seed=3)
    assert batches_of(loader) == batches_of(expected)


def test_nothing_is_warned_of_otherwise() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_data_loader(loader_over(), use_seedable_sampler=True, data_seed=0)


# Where the seed comes from.


def order_of(seed: int, n: int = 8) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def shuffled_by(loader: Any) -> list[int]:
    return [one for batch in batches_of(loader) for one in batch]


def test_the_flag_chooses_where_the_seed_comes_from() -> None:
    generator = torch.Generator().manual_seed(12)
    torch.rand(3, generator=generator)  # where it has moved to does not matter
    plain, own = {"shuffle": True}, {"shuffle": True, "generator": generator}
    torch.manual_seed(11)
    seedable: dict[str, Any] = {"use_seedable_sampler": True}
    cases: list[tuple[dict[str, Any], dict[str, Any], int]] = [
        (plain, {**seedable, "data_seed": 13}, 13),
        (own, {**seedable, "data_seed": 13}, 13),
        (own, seedable, 12),
        (own, {}, 12),
        (plain, seedable, 11),
    ]
    for of_loader, options, seed in cases:
        prepared = prepare_data_loader(loader_over(**of_loader), **options)
        assert shuffled_by(prepared) == order_of(seed), (options, seed)
    state = torch.get_rng_state()
    drawn = int(torch.randint(2**62, ()))
    torch.set_rng_state(state)
    assert shuffled_by(prepare_data_loader(loader_over(**plain))) == order_of(drawn)


@pytest.mark.parametrize("seed", [2**64 - 1, 2**63 + 9, -1, -(2**63), 2**63 - 1])
def test_any_seed_that_torch_takes_will_do(seed: int) -> None:
    loader = prepare_data_loader(
        loader_over(shuffle=True), use_seedable_sampler=True, data_seed=seed
    )
    assert shuffled_by(loader) == order_of(seed)
    assert shuffled_by(loader) == order_of((seed + 1) % 2**64)


def test_the_generator_inside_a_batch_sampler_gives_the_seed() -> None:
    generator = torch.Generator().manual_seed(12)
    batch_sampler = BatchSampler(RandomSampler(range(8), generator=generator), 4, False)
    loader = prepare_data_loader(loader_over(batch_sampler=batch_sampler))
    assert shuffled_by(loader) == order_of(12)


def test_a_generator_of_the_data_sets_own_gives_none() -> None:
    class Draws(Dataset[int]):
        generator = torch.Generator()

        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 8

    torch.manual_seed(11)
    loader = prepare_data_loader(DataLoader(Draws(), shuffle=True), use_seedable_sampler=True)
    assert shuffled_by(loader) == order_of(11)


def test_torchdatas_samplers_are_seen_through() -> None:
    samples: Any = torch.arange(10)
    theirs = StatefulDataLoader(
        samples, 3, shuffle=True, generator=torch.Generator().manual_seed(12)
    )
    loaders = simulated(theirs, 2)
    order = order_of(12, 10)
    assert batches_of(loaders[0]) == [order[0:3], order[6:9]]
    assert batches_of(loaders[1]) == [order[3:6], [order[9], *order[:2]]]
    assert [loader.total_dataset_length for loader in loaders] == [10, 10]


# What is left alone.


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    return {name: value for name, value in vars(loader).items() if not name.startswith("_")}


@pytest.mark.parametrize("own_batches", [False, True])
def test_the_users_objects_are_not_changed(own_batches: bool) -> None:
    stored = [[0, 1], [2, 3], [4]]
    names = ["torch", "generator"]
    if own_batches:
        loader = loader_over(batch_sampler=stored)
    else:
        generator = torch.Generator().manual_seed(1)
        loader = loader_over(5, shuffle=True, generator=generator)
    before = options_of(loader)
    samplers = vars(loader.sampler).copy()

    def use() -> None:
        prepared = prepare_data_loader(loader, num_processes=2, process_index=1, rng_types=names)
        prepared.set_epoch(3)
        prepared.worker_init_fn = print
        for batch in prepared:
            batch += 100
        for indices in prepared.batch_sampler or ():
            indices.append(99)
        skip_first_batches(prepared, 1)
        list(skip_first_batches(loader, 1))

    laws.hands_off(use, stored, names)
    assert options_of(loader) == before
    assert vars(loader.sampler) == samplers
    assert loader._iterator is None


def test_a_users_loader_keeps_its_class_its_attributes_and_its_own_iter() -> None:
    loader = Own(torch.arange(5), batch_size=2)
    prepared = simulated(loader, 2)
    assert batches_of(prepared[0]) == [[0, -1], [-4, 0]]
    assert batches_of(prepared[1]) == [[-2, -3], [-1, -2]]
    assert prepared[0].extra == ["kept"]
    assert isinstance(prepared[0], DataLoader)


def test_a_prepared_loader_comes_back_as_it_is() -> None:
    prepared = prepare_data_loader(loader_over())
    assert prepare_data_loader(prepared) is prepared


# How it is divided.


@pytest.mark.parametrize("tail", [None, *Tail])
def test_the_tail_is_chosen_by_the_flags_unless_it_is_said(tail: Tail | None) -> None:
    for even, drop in product((False, True), (False, True)):
        loader = loader_over(11, 2, drop_last=drop)
        chosen = tail
        if chosen is None:
            chosen = Tail.DROP if drop else (Tail.PAD if even else Tail.UNEVEN)
        case = Case(11, 2, 2, tail=chosen)
        expected = [[list(step.rows) for step in rank.steps] for rank in reference.epoch(case)]
        name = None if tail is None else tail.value
        loaders = simulated(loader, 2, even_batches=even, tail=name)
        assert [batches_of(each) for each in loaders] == expected
        assert {each.tail for each in loaders} == {chosen}


def test_drop_last_of_a_batch_sampler_counts() -> None:
    loader = loader_over(batch_sampler=BatchSampler(range(7), 2, True))
    assert [each.tail for each in simulated(loader, 2)] == [Tail.DROP] * 2


def test_alone_nothing_is_padded() -> None:
    assert batches_of(prepare_data_loader(loader_over(5))) == [[0, 1], [2, 3], [4]]
    assert batches_of(prepare_data_loader(loader_over(5), tail="pad")) == [[0, 1], [2, 3], [4]]
    assert batches_of(prepare_data_loader(loader_over(5, drop_last=True))) == [[0, 1], [2, 3]]


def test_a_simulation_is_what_names_another_place() -> None:
    assert not prepare_data_loader(loader_over()).is_simulation
    assert not prepare_data_loader(loader_over(), num_processes=1).is_simulation
    assert simulated(loader_over(), 2)[0].is_simulation
    assert simulated(loader_over(), 3)[2].shard == Shard(2, 3)


# Cut before.


def test_our_own_shards_are_not_cut_again() -> None:
    for rank in range(2):
        sampler = BatchSamplerShard(BatchSampler(range(5), 2, False), 2, rank)
        loader = loader_over(5, batch_sampler=sampler)
        prepared = prepare_data_loader(loader)
        got = [(step.rows, step.valid_rows) for step in laws.loader_rank(prepared).steps]
        assert got == [[((0, 1), 2), ((4, 0), 1)], [((2, 3), 2), ((1, 2), 0)]][rank]
        assert (prepared.shard, prepared.tail) == (Shard(rank, 2), Tail.PAD)


def test_a_shuffled_shard_of_ours_follows_the_seed_too() -> None:
    shuffling = RandomSampler(range(6), generator=torch.Generator().manual_seed(4))
    sampler = BatchSamplerShard(BatchSampler(shuffling, 2, False), 3, 1)
    prepared = prepare_data_loader(loader_over(6, batch_sampler=sampler))
    for epoch in range(2):
        assert batches_of(prepared) == [order_of(4 + epoch, 6)[2:4]]
    assert sampler.sampler is shuffling


def test_our_own_stream_shards_are_not_cut_again() -> None:
    for rank, expected in enumerate(([[0, 1], [4, 5]], [[2, 3], [6, 7]])):
        stream = IterableDatasetShard(Stream(range(8)), 2, num_processes=2, process_index=rank)
        prepared = prepare_data_loader(
            DataLoader(stream, batch_size=2), num_processes=2, process_index=rank
        )
        assert batches_of(prepared) == expected


def test_a_shard_of_one_is_divided_like_anything_else() -> None:
    loader = loader_over(8, batch_sampler=BatchSamplerShard(BatchSampler(range(8), 2, False)))
    assert [batches_of(each) for each in simulated(loader, 2)] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
    ]
    # Unless the user says that it is this rank's part.
    kept = simulated(loader, 2, already_sharded=True)
    assert [batches_of(each) for each in kept] == [[[0, 1], [2, 3], [4, 5], [6, 7]]] * 2
    assert [each.shard for each in kept] == [Shard(0, 2), Shard(1, 2)]


# Built directly.


def test_built_directly_it_delivers_the_loader_of_its_arguments() -> None:
    for n, size, drop in product((0, 1, 5, 6), (1, 2, 4, None), (False, True)):
        if size is None and drop:
            continue
        samples: Any = torch.arange(n)
        options: dict[str, Any] = {"batch_size": size, "drop_last": drop}
        loader = DataLoaderShard(samples, **options)
        plain: DataLoader[Any] = DataLoader(samples, **options)
        assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in plain]
        assert len(loader) == len(plain)
    custom = DataLoaderShard(torch.arange(5), batch_sampler=[[4, 0], [2]])
    assert batches_of(custom) == [[4, 0], [2]]


def test_built_directly_it_shuffles_by_the_seed_of_its_generator() -> None:
    generator = torch.Generator().manual_seed(2)
    loader = DataLoaderShard(torch.arange(8), batch_size=3, shuffle=True, generator=generator)
    for epoch in range(3):
        assert shuffled_by(loader) == order_of(2 + epoch)
    assert generator.initial_seed() == 2
    before = torch.get_rng_state()
    drawn = DataLoaderShard(torch.arange(30), batch_size=30, shuffle=True)
    epochs = [shuffled_by(drawn) for _ in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    torch.set_rng_state(before)
    again = DataLoaderShard(torch.arange(30), batch_size=30, shuffle=True)
    assert [shuffled_by(again) for _ in range(3)] == epochs


def test_built_directly_over_a_shard_it_knows_the_padding() -> None:
    sampler = BatchSamplerShard(BatchSampler(range(5), 2, False), 2, 1)
    loader = DataLoaderShard(torch.arange(5), batch_sampler=sampler)
    got = [(batch.tolist(), loader.valid_rows) for batch in loader]
    assert got == [([2, 3], 2), ([1, 2], 0)]


def test_built_directly_it_skips_and_moves() -> None:
    loader = DataLoaderShard(torch.arange(7), device="meta", skip_batches=2, batch_size=2)
    for _ in range(2):
        assert [batch.shape for batch in loader] == [(2,), (1,)]
        assert all(batch.device.type == "meta" for batch in loader)
        assert len(loader) == 2
    assert len(DataLoaderShard(torch.arange(7), skip_batches=9)) == 0


def test_batches_go_where_they_are_asked_to() -> None:
    options: dict[str, Any] = {"device": "meta"}
    stays, goes = (
        next(iter(prepare_data_loader(loader_over(), put_on_device=put, **options)))
        for put in (False, True)
    )
    assert (stays.device.type, goes.device.type) == ("cpu", "meta")
    own = next(iter(prepare_data_loader(loader_over(), put_on_device=True)))
    assert own.device.type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(range(3)),
        [5, 2, 7],
        SeedableRandomSampler(range(8), data_seed=3),
        PermutedSampler(8, seed=3),
    ],
)
def test_samplers_of_the_users_are_kept(sampler: Any) -> None:
    torch.manual_seed(9)
    expected = list(sampler)
    torch.manual_seed(9)
    prepared = simulated(loader_over(sampler=sampler), 1)[0]
    torch.manual_seed(9)
    assert shuffled_by(prepared) == expected
    assert prepared.total_dataset_length == len(expected)
