"""Tags of samples, whatever the data set is and does."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from shardplug import Shard, prepare_data_loader
from shardplug.cli.tracing import (
    CONTENT,
    DRAWS,
    ID,
    WORKER,
    Probe,
    TracedBatch,
    digest,
    trace,
    trace_dataset,
)
from shardplug.samplers import HasEpoch, known_length
from shardplug.streams import own_part


class Plain(Dataset[Any]):
    """Has nothing but items."""

    factor = 1

    def __getitem__(self, key: Any) -> Any:
        return key if isinstance(key, str) else self.factor * key


class Rich(Plain):
    """Has all that is looked for."""

    def __init__(self) -> None:
        self.epoch = 0
        self.fetched: list[list[int]] = []

    def __getitems__(self, keys: list[int]) -> list[int]:
        self.fetched.append(list(keys))
        return [10 * self.epoch + key for key in keys]

    def __len__(self) -> int:
        return 6

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Shards(IterableDataset[Any]):
    """A stream that divides itself when it is asked to."""

    def __init__(self, items: range = range(8)) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.items[index::num_shards])


def test_a_wrapper_has_what_its_data_set_has() -> None:
    rich, plain, shards = (trace_dataset(each) for each in (Rich(), Plain(), Shards()))
    assert isinstance(rich, HasEpoch)
    assert known_length(rich) == 6
    assert not isinstance(plain, HasEpoch)
    assert known_length(plain) is None
    assert not hasattr(plain, "__getitems__")
    assert isinstance(shards, IterableDataset)
    part = own_part(shards, Shard(1, 2))
    assert part is not None
    assert [item.value for item in part] == [1, 3, 5, 7]
    assert own_part(plain, Shard(1, 2)) is None


def test_what_is_set_on_a_wrapper_is_set_on_its_data_set() -> None:
    plain = Plain()
    wrapper = trace_dataset(plain)
    wrapper.factor = 3
    assert (plain.factor, wrapper.factor, wrapper[2].value) == (3, 3, 6)
    with pytest.raises(AttributeError, match="attic"):
        _ = wrapper.attic


def test_a_wrapper_can_be_sent_to_a_worker_and_copied() -> None:
    for made in (
        pickle.loads(pickle.dumps(trace_dataset(Rich()))),
        copy.copy(trace_dataset(Rich())),
    ):
        assert made[2].tag[ID] == 2
        assert known_length(made) == 6


def test_samples_that_are_fetched_together_are_tagged_one_by_one() -> None:
    data = Rich()
    loader = trace(DataLoader(data, batch_size=2))
    batches = list(loader)
    assert data.fetched == [[0, 1], [2, 3], [4, 5]]
    assert torch.cat([batch.tags[:, ID] for batch in batches]).tolist() == list(range(6))
    assert [batch.batch.tolist() for batch in batches] == data.fetched


def test_a_prepared_loader_tells_the_epoch_through_the_wrapper() -> None:
    data = Rich()
    prepared = prepare_data_loader(trace(DataLoader(data, batch_size=3)))
    passes = [[batch.batch.tolist() for batch in prepared] for _ in range(2)]
    assert passes == [[[0, 1, 2], [3, 4, 5]], [[10, 11, 12], [13, 14, 15]]]


def test_keys_that_are_no_numbers_get_numbers_that_are_no_index() -> None:
    loader = trace(DataLoader(Plain(), batch_size=1, sampler=["a", "b", "a"]))
    first, second, third = (int(batch.tags[0, ID]) for batch in loader)
    assert first == third != second
    assert max(first, second) < 0


def tell_offset(worker: int) -> None:
    info = get_worker_info()
    data: Any = info and info.dataset
    data.factor = 100


def test_a_worker_init_fn_reaches_the_data_set() -> None:
    loader = DataLoader(Plain(), 2, sampler=range(4), num_workers=2, worker_init_fn=tell_offset)
    batches = list(trace(loader))
    assert [batch.batch.tolist() for batch in batches] == [[0, 100], [200, 300]]
    assert [batch.tags[:, WORKER].tolist() for batch in batches] == [[0, 0], [1, 1]]


def test_ready_batches_have_a_tag_for_each_row() -> None:
    data: Any = torch.arange(12).reshape(3, 4)
    batches = list(trace(DataLoader(data, batch_size=None)))
    assert [batch.tags[:, ID].tolist() for batch in batches] == [[0] * 4, [1] * 4, [2] * 4]
    odd: Any = [{"a": torch.zeros(2), "b": torch.zeros(3)}, 7]
    assert [len(batch.tags) for batch in trace(DataLoader(odd, batch_size=None))] == [1, 1]


def test_the_loader_of_the_user_stays_as_it_is() -> None:
    loader: DataLoader[Any] = DataLoader(Rich(), batch_size=2)
    before = dict(vars(loader))
    list(trace(loader))
    assert vars(loader) == before


# -- what was drawn from --

GLOBAL: dict[str, Callable[[], float]] = {
    "python": random.random,
    "numpy": lambda: float(np.random.random()),
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("place", range(3))
def test_a_probe_tells_which_global_generator_was_drawn_from(place: int) -> None:
    draw = list(GLOBAL.values())[place]
    probe = Probe(())
    assert probe.drawn() == [0, 0, 0, 0]
    draw()
    first = probe.drawn()
    assert [bool(state) for state in first] == [at == place for at in range(3)] + [False]
    again = Probe(())
    draw()
    assert again.drawn()[place] not in (0, first[place])


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(1),
        lambda: random.Random(1),
        lambda: np.random.default_rng(1),
        lambda: np.random.RandomState(1),
    ],
)
def test_generators_of_a_data_set_are_found_and_alike_where_their_states_are(make: Any) -> None:
    class Holding(Plain):
        def __init__(self) -> None:
            self.inside = [make()]

        def __getitem__(self, index: int) -> Any:
            if isinstance(self.inside[0], torch.Generator):
                return torch.rand((), generator=self.inside[0])
            return self.inside[0].random()

    one, other = trace_dataset(Holding()), trace_dataset(Holding())
    first = one[0].tag[DRAWS]
    assert first[:3] == (0, 0, 0)
    assert first[3] != 0
    assert other[5].tag[DRAWS] == first
    assert one[1].tag[DRAWS] != first


def test_what_collate_draws_is_noted() -> None:
    def collate(samples: list[int]) -> Any:
        torch.rand(())
        return samples

    batches = list(trace(DataLoader(Plain(), 2, sampler=range(4), collate_fn=collate)))
    states = [batch.tags[:, DRAWS].tolist() for batch in batches]
    assert all(row[:4] == [0] * 4 and row[4] for rows in states for row in rows)
    assert states[0][0] == states[0][1] != states[1][0]


class NoisyStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[float]:
        for number in range(3):
            yield number + random.random() + float(np.random.random()) + float(torch.rand(()))


def test_copies_of_a_stream_are_alike_and_what_they_draw_is_not() -> None:
    items = [list(trace_dataset(NoisyStream())) for _ in range(2)]
    one, other = (torch.tensor([item.tag for item in each]) for each in items)
    assert torch.equal(one[:, [ID, CONTENT]], other[:, [ID, CONTENT]])
    assert len(set(one[:, CONTENT].tolist())) == 3
    states = torch.cat([one, other])[:, DRAWS][:, :3]
    assert states.all()
    assert len(torch.unique(states)) == states.numel()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(3), torch.arange(4)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64) + 1),
        ({"a": 1}, {"b": 1}),
        (np.zeros(3), np.ones(3)),
        ("a", "b"),
        ((1, [2, None]), (1, [3, None])),
        (torch.zeros(()), torch.ones(())),
        (torch.zeros(0), torch.zeros(1)),
    ],
)
def test_a_digest_stands_for_what_a_sample_holds(one: Any, other: Any) -> None:
    assert digest(one) == digest(copy.deepcopy(one))
    assert digest(one) != digest(other)


def test_what_cannot_be_pickled_is_known_by_its_type() -> None:
    assert digest(lambda: 1) == digest(lambda: 2) != digest(object())


def test_a_traced_batch_is_a_pair() -> None:
    batch = TracedBatch(torch.zeros(1), "batch")
    assert (len(batch), batch.batch) == (2, "batch")
