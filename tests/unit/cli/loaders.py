"""Loaders for `shardplug check`: with one fault planted in each, and sound ones."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from shardplug import prepare_data_loader

NUM_SAMPLES = 24


def numbers(num_samples: int = NUM_SAMPLES) -> Any:
    """Sample i is i."""
    return torch.arange(num_samples)


# -- data sets and samplers --


class Noisy(Dataset[Any]):
    """Adds noise from a global generator, of torch, numpy or python."""

    def __init__(self, source: str = "torch") -> None:
        self.source = source

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        draw = {
            "torch": lambda: torch.rand(()).item(),
            "numpy": lambda: float(np.random.random()),
            "python": random.random,
        }[self.source]
        return index + draw()


class Seeding(Noisy):
    """Seeds a global generator by the sample before it draws."""

    def __getitem__(self, index: int) -> Any:
        seed: Any = {"torch": torch.manual_seed, "numpy": np.random.seed, "python": random.seed}
        seed[self.source](index)
        return super().__getitem__(index)


class SeedingAlike(Noisy):
    """Seeds a global generator by the same number for each sample, and draws one to three times."""

    def __init__(self, source: str) -> None:
        super().__init__(source)

    def __getitem__(self, index: int) -> Any:
        seed: Any = {"torch": torch.manual_seed, "numpy": np.random.seed, "python": random.seed}
        seed[self.source](5)
        if self.source == "torch":
            return index + torch.rand(1 + index % 3).sum()
        return sum(super(SeedingAlike, self).__getitem__(index) for _ in range(1 + index % 3))


class SeedingStream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for item in range(NUM_SAMPLES):
            random.seed(5)
            yield item + random.random()


def _collate_seeding(samples: list[Any], by_sample: bool = False) -> Any:
    random.seed(int(samples[0]) if by_sample else 3)
    return torch.tensor([float(sample) + random.random() for sample in samples])


class NoisyByItself(Dataset[Any]):
    """Adds noise from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.transforms = [Jitter(generator)]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.transforms[0].apply(index)


class Jitter:
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def apply(self, value: float) -> float:
        if isinstance(self.generator, torch.Generator):
            return value + float(torch.rand((), generator=self.generator))
        return value + float(self.generator.random())


class Broken(Dataset[Any]):
    """Cannot make its 14th sample."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            raise OSError("sample 13 is damaged")
        return index


class ByKey(Dataset[Any]):
    """Has its samples by keys that are no numbers."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, key: Any) -> int:
        return len(str(key))


class Fixed(Sampler[Any]):
    """The same ids each time, in no order."""

    def __init__(self, ids: Any) -> None:
        self.ids = ids

    def __iter__(self) -> Iterator[Any]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)


class Drawn(Sampler[int]):
    """A new order each time, from torch's global generator."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(NUM_SAMPLES).tolist()

    def __len__(self) -> int:
        return NUM_SAMPLES


class PartOfOwnOrder(Sampler[int]):
    """A rank's part of an order that only this rank has."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(NUM_SAMPLES).tolist()[self.rank :: self.world_size]

    def __len__(self) -> int:
        return NUM_SAMPLES // self.world_size


class ByEpoch(Sampler[int]):
    """An order that follows the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(NUM_SAMPLES, generator=generator).tolist()

    def __len__(self) -> int:
        return NUM_SAMPLES


class Batches(Sampler[list[int]]):
    """Batches of two to four, and a length that may lie."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[list[int]]:
        for start, size in ((0, 4), (4, 2), (6, 4), (10, 2), (12, 4), (16, 2), (18, 4), (22, 2)):
            yield list(range(start, start + size))

    def __len__(self) -> int:
        return 8 if self.length is None else self.length


class Stream(IterableDataset[Any]):
    """Numbers one by one; every worker makes all of them."""

    def __init__(self, num_items: int = NUM_SAMPLES, first: int = 0, step: int = 1) -> None:
        self.items = range(first, num_items, step)

    def __iter__(self) -> Iterator[int]:
        yield from self.items


class NoisyStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            yield item + torch.rand(()).item()


class SplitByWorker(Stream):
    """Divides itself among its workers."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        yield from self.items[first::step]


class LyingStream(Stream):
    """Has fewer items than it says."""

    def __len__(self) -> int:
        return 2 * NUM_SAMPLES


# -- with a fault --


def shuffled_by_each() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, shuffle=True)


def distributed(rank: int, world_size: int, num_samples: int = NUM_SAMPLES) -> DataLoader[Any]:
    sampler: Sampler[int] = DistributedSampler(numbers(num_samples), world_size, rank)
    return DataLoader(numbers(num_samples), batch_size=2, sampler=sampler)


def filled_up(rank: int, world_size: int) -> DataLoader[Any]:
    return distributed(rank, world_size, 21)


def parts_of_own_orders(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=PartOfOwnOrder(rank, world_size))


def with_gaps() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=Fixed(list(range(0, NUM_SAMPLES, 2))))


def with_repeats() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=Fixed(sorted([*range(NUM_SAMPLES), 3, 4])))


def drawn_by_each() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=Drawn())


LETTERS = [chr(ord("a") + at) for at in range(NUM_SAMPLES)]
PAIRS = [(at, 7 * at % 5) for at in range(NUM_SAMPLES)]


def keyed(keys: Any = LETTERS) -> DataLoader[Any]:
    return DataLoader(ByKey(), batch_size=2, sampler=Fixed(keys))


def keyed_by_pairs() -> DataLoader[Any]:
    return keyed(PAIRS)


def keyed_by_arrays() -> DataLoader[Any]:
    return keyed([np.arange(2000) == at for at in range(900, 900 + NUM_SAMPLES)])


def keyed_with_repeats() -> DataLoader[Any]:
    return keyed([*LETTERS, "c", "d"])


def numpy_ids() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=Fixed(np.arange(NUM_SAMPLES)))


def tensor_ids() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=Fixed(torch.arange(NUM_SAMPLES)))


def array_batches() -> DataLoader[Any]:
    batches: Any = Fixed(np.arange(NUM_SAMPLES).reshape(-1, 2))
    return DataLoader(numbers(), batch_sampler=batches)


def numpy_gaps() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=Fixed(np.arange(0, NUM_SAMPLES, 2)))


def filled_up_in_order(rank: int, world_size: int) -> DataLoader[Any]:
    data = numbers(61)
    sampler: Sampler[int] = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(data, batch_size=4, sampler=sampler)


def filled_up_blocks(rank: int, world_size: int) -> DataLoader[Any]:
    """Each rank has a block; the last goes back to the start of its own."""
    block = -(-61 // world_size)
    ids = list(range(rank * block, min(61, (rank + 1) * block)))
    ids += ids[: block - len(ids)]
    return DataLoader(numbers(61), batch_size=4, sampler=Fixed(ids))


def twice_in_order() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=Fixed([*range(NUM_SAMPLES)] * 2))


def same_each_epoch() -> DataLoader[Any]:
    order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    return DataLoader(numbers(), batch_size=2, sampler=Fixed(order))


def too_long() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_sampler=Batches(12))


def lying_stream() -> DataLoader[Any]:
    return DataLoader(LyingStream(), batch_size=2)


def uneven(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=range(NUM_SAMPLES)[rank::world_size])


def uneven_stream(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(Stream(26, rank, world_size), batch_size=2)


def odd_number() -> DataLoader[Any]:
    return DataLoader(numbers(21), batch_size=2)


def seeded_alike() -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(Noisy(), batch_size=2)


def constant_torch() -> DataLoader[Any]:
    return DataLoader(SeedingAlike("torch"), batch_size=2, shuffle=True)


def constant_numpy() -> DataLoader[Any]:
    return DataLoader(SeedingAlike("numpy"), batch_size=2, num_workers=1)


def constant_python() -> DataLoader[Any]:
    return DataLoader(SeedingAlike("python"), batch_size=2)


def constant_collate() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, collate_fn=_collate_seeding)


def constant_stream() -> DataLoader[Any]:
    return DataLoader(SeedingStream(), batch_size=2)


def collate_by_sample() -> DataLoader[Any]:
    collate = partial(_collate_seeding, by_sample=True)
    return DataLoader(numbers(), batch_size=2, collate_fn=collate)


def own_generator(num_workers: int = 0) -> DataLoader[Any]:
    data = NoisyByItself(np.random.default_rng(0))
    return DataLoader(data, batch_size=2, num_workers=num_workers)


def own_generator_in_workers(rank: int) -> DataLoader[Any]:
    data = NoisyByItself(torch.Generator().manual_seed(rank))
    return DataLoader(data, batch_size=2, num_workers=2)


def own_generator_in_one_worker(rank: int) -> DataLoader[Any]:
    data = NoisyByItself(random.Random(rank))
    return DataLoader(data, batch_size=2, num_workers=1)


def stream_in_workers(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(Stream(NUM_SAMPLES, rank, world_size), batch_size=2, num_workers=2)


def noisy_stream_in_workers(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(NoisyStream(NUM_SAMPLES, rank, world_size), batch_size=2, num_workers=2)


def cut_stream(rank: int, world_size: int) -> DataLoader[Any]:
    """A part of its own, which `prepare_data_loader` cannot see is one."""
    return DataLoader(Stream(NUM_SAMPLES, rank, world_size), batch_size=2)


class Leaving(Broken):
    """Wants to end the process."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __getitem__(self, index: int) -> Any:
        raise self.error(3)


class OfNobody(BaseException):
    """No Exception."""


def exiting_sample() -> DataLoader[Any]:
    return DataLoader(Leaving(SystemExit), batch_size=2)


def odd_error() -> DataLoader[Any]:
    return DataLoader(Leaving(OfNobody), batch_size=2)


def broken_in_worker() -> DataLoader[Any]:
    return DataLoader(Broken(), batch_size=2, num_workers=1)


class BrokenAlone(Stream):
    """Ends the process where it is not divided."""

    def __iter__(self) -> Iterator[int]:
        if len(self.items) == NUM_SAMPLES:
            raise SystemExit(4)
        yield from self.items


def broken_alone(rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(BrokenAlone(NUM_SAMPLES, rank, world_size), batch_size=2)


def broken() -> DataLoader[Any]:
    return DataLoader(Broken(), batch_size=2)


def other_data(rank: int) -> DataLoader[Any]:
    return DataLoader(numbers(NUM_SAMPLES + rank), batch_size=2)


# -- sound --


def sequential() -> DataLoader[Any]:
    return DataLoader(numbers(21), batch_size=4)


def shuffled() -> DataLoader[Any]:
    return DataLoader(numbers(23), batch_size=4, shuffle=True)


def dropping() -> DataLoader[Any]:
    return DataLoader(numbers(23), batch_size=4, shuffle=True, drop_last=True)


def noisy(source: str = "torch", num_workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Noisy(source), batch_size=2, shuffle=True, num_workers=num_workers)


def noisy_numpy() -> DataLoader[Any]:
    return noisy("numpy")


def noisy_in_workers() -> DataLoader[Any]:
    return noisy("python", num_workers=2)


def seeding(source: str = "torch") -> DataLoader[Any]:
    return DataLoader(Seeding(source), batch_size=2)


def seeding_numpy() -> DataLoader[Any]:
    return seeding("numpy")


def seeding_python() -> DataLoader[Any]:
    return seeding("python")


def weighted() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    sampler = WeightedRandomSampler([1.0, 5.0] * 12, NUM_SAMPLES, generator=generator)
    return DataLoader(numbers(), batch_size=2, sampler=sampler)


def subset() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    sampler = SubsetRandomSampler(range(4, 16), generator)
    return DataLoader(numbers(), batch_size=2, sampler=sampler)


def ready_batches() -> DataLoader[Any]:
    return DataLoader(torch.arange(48).reshape(12, 4), batch_size=None)  # type: ignore[arg-type]


def bucketed() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_sampler=Batches())


def by_epoch() -> DataLoader[Any]:
    return DataLoader(numbers(), batch_size=2, sampler=ByEpoch())


def batch_sampled() -> DataLoader[Any]:
    batches = BatchSampler(RandomSampler(numbers()), 2, drop_last=False)
    return DataLoader(numbers(), batch_sampler=batches)


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(23), batch_size=2)


def whole_stream_in_workers() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=2, num_workers=2)


def split_stream_in_workers() -> DataLoader[Any]:
    return DataLoader(SplitByWorker(), batch_size=2, num_workers=2)


def noisy_stream() -> DataLoader[Any]:
    return DataLoader(NoisyStream(), batch_size=2)


class Module:
    """What a LightningDataModule looks like to who asks it for its loaders."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.calls == ["prepare", "fit"]
        return shuffled()

    def val_dataloader(self) -> DataLoader[Any]:
        assert self.calls == ["prepare", "validate"]
        return with_gaps()


class Doubling(DataLoader[Any]):
    """Works on its batches, which have to be those of the user's collate function."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield 2 * batch


class Bypassing(DataLoader[Any]):
    """Passes its batches on, but not by way of its parents."""

    def __iter__(self) -> Any:
        yield from DataLoader.__iter__(self)


def own_iter() -> DataLoader[Any]:
    return Doubling(numbers(23), batch_size=2, shuffle=True)


def bypassing() -> DataLoader[Any]:
    return Bypassing(numbers(23), batch_size=2)


def stateful() -> DataLoader[Any]:
    loader: DataLoader[Any] = StatefulDataLoader(numbers(23), batch_size=2, shuffle=True)
    return loader


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return count()


def endless() -> DataLoader[Any]:
    return DataLoader(Endless(), batch_size=2)


def warning() -> DataLoader[Any]:
    warnings.warn("this is\nold", DeprecationWarning, stacklevel=1)
    return shuffled()


# -- nothing to be checked --


def empty() -> DataLoader[Any]:
    return DataLoader([], batch_size=2)  # type: ignore[arg-type]


async def asynchronous() -> DataLoader[Any]:
    return shuffled()


def needy(path: str, size: int) -> DataLoader[Any]:
    raise AssertionError(path, size)


def odd_start() -> DataLoader[Any]:
    raise OfNobody("never mind")


class Several(Module):
    """Has more than one loader for each stage but one."""

    def val_dataloader(self) -> Any:
        return [shuffled(), sequential()]

    def test_dataloader(self) -> Any:
        return {"one": shuffled()}

    async def predict_dataloader(self) -> Any:
        return shuffled()


A_NUMBER = 7


def not_a_loader() -> list[int]:
    return [1, 2, 3]


def raising() -> DataLoader[Any]:
    raise FileNotFoundError("no such\nfolder")


def exiting() -> DataLoader[Any]:
    raise SystemExit(3)


class OwnStateful(StatefulDataLoader):  # type: ignore[misc]
    def __iter__(self) -> Any:
        yield from super().__iter__()


def own_stateful() -> DataLoader[Any]:
    return OwnStateful(numbers())


def prepared() -> DataLoader[Any]:
    return prepare_data_loader(shuffled())
