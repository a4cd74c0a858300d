"""Nested batches are cut, joined, filled up and moved as their samples would be one by one."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, field, fields, is_dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import default_collate

from shardplug.errors import BatchError
from shardplug.rows import (
    count_rows,
    join_outputs,
    join_rows,
    leaves,
    map_leaves,
    move_to_device,
    pad_rows,
    slice_rows,
    slice_tensors,
    take_rows,
    trim_outputs,
)

META = torch.device("meta")


class Thing:
    """An object that is no container; its name is the same in every process."""

    def __repr__(self) -> str:
        return "thing"


THING = Thing()


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(BatchError) as caught:
        call()
    return str(caught.value)


def same(one: Any, other: Any) -> bool:
    """Compare two batches to the last bit and type."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and not one.is_nested:
        dense = [each.to_dense() if each.is_sparse else each for each in (one, other)]
        return (one.dtype, one.layout) == (other.dtype, other.layout) and torch.equal(*dense)
    if isinstance(one, np.ndarray):
        return one.dtype.kind == other.dtype.kind and np.array_equal(one, other)
    inside, others = pieces(one), pieces(other)
    if inside is None or others is None:
        return bool(one is other or one == other)
    return len(inside) == len(others) and all(map(same, inside, others))


def pieces(batch: Any) -> list[Any] | None:
    if isinstance(batch, Tensor):
        return list(batch.unbind())
    if isinstance(batch, PackedSequence):
        return unpack_sequence(batch)
    if isinstance(batch, Mapping):
        return [*batch, *batch.values()]
    if is_dataclass(batch):
        return [getattr(batch, each.name) for each in fields(batch)]
    return list(batch) if isinstance(batch, (list, tuple, UserList, deque)) else None


# What carries rows, made from any list of row numbers.


def ragged(row: int) -> Tensor:
    return torch.full((row % 3 + 1, 2), float(row))


def jagged(rows: list[int]) -> Tensor:
    return torch.nested.as_nested_tensor([ragged(row) for row in rows], layout=torch.jagged)


ROW_KINDS: dict[str, Callable[[list[int]], object]] = {
    "integers": lambda rows: torch.tensor(rows, dtype=torch.int64),
    "matrix": lambda rows: torch.tensor([[row, -row] for row in rows], dtype=torch.float64),
    "flags": lambda rows: torch.tensor([row % 2 == 0 for row in rows]),
    "halves": lambda rows: torch.tensor(rows, dtype=torch.bfloat16),
    "sparse": lambda rows: torch.eye(9)[torch.tensor(rows, dtype=torch.int64)].to_sparse(),
    "jagged": jagged,
    "packed": lambda rows: pack_sequence([ragged(row) for row in rows], enforce_sorted=False),
    "array": lambda rows: np.array(rows, dtype=np.int32),
    "image array": lambda rows: np.array([[[row, 1]] for row in rows], dtype=np.uint8),
    "string array": lambda rows: np.array(["x" * row for row in rows]),
    "strings": lambda rows: [f"s{row}" for row in rows],
    "tuple of strings": lambda rows: tuple(f"s{row}" for row in rows),
    "bytes": lambda rows: [bytes([row]) for row in rows],
    "numbers and None": lambda rows: [row / 2 if row else None for row in rows],
    "bools": lambda rows: [row > 3 for row in rows],
    "objects": lambda rows: [THING for _ in rows],
    "scalars": lambda rows: [torch.tensor(row) for row in rows],
    "dicts of values": lambda rows: [{"id": row, "tag": "t"} for row in rows],
    "deque": lambda rows: deque(str(row) for row in rows),
    "user list": lambda rows: UserList(str(row) for row in rows),
    "ragged tensors": lambda rows: [ragged(row) for row in rows],
    "tuple of ragged dicts": lambda rows: tuple({"boxes": ragged(row)} for row in rows),
    "lists of words": lambda rows: [["w"] * (row % 3) for row in rows],
}
ROWS = [3, 8, 0, 5]


@pytest.fixture(params=ROW_KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[list[int]], dict[str, object]]:
    """A batch of a tensor, whose rows are plain to see, and something else that carries rows."""
    kind = ROW_KINDS[request.param]
    return lambda rows: {"anchor": torch.tensor(rows, dtype=torch.int64), "it": kind(rows)}


Make = Callable[[list[int]], dict[str, object]]


def test_slice_rows_takes_the_rows_of_every_kind(make: Make) -> None:
    batch = make(ROWS)
    assert count_rows(batch) == 4
    for rows in (slice(1, 3), slice(0, 4), slice(2), slice(-1, None), slice(None, None, -1)):
        assert same(slice_rows(batch, rows), make(ROWS[rows]))
        assert same(slice_tensors(batch, rows, 1, 2), make(ROWS[rows]))
    assert same(batch, make(ROWS))


def test_take_rows_takes_the_rows_of_every_kind(make: Make) -> None:
    batch = make(ROWS)
    for positions in ([2], [3, 0], [1, 1, 2, 1, 0], [0, 1, 2, 3]):
        assert same(take_rows(batch, positions), make([ROWS[row] for row in positions]))
    assert same(batch, make(ROWS))


def test_join_rows_puts_the_rows_of_every_kind_together(make: Make) -> None:
    parts = [make([3, 8]), make([0]), make([5, 1, 2])]
    assert same(join_rows(parts), make([3, 8, 0, 5, 1, 2]))
    assert same(parts, [make([3, 8]), make([0]), make([5, 1, 2])])


def test_pad_rows_cycles_through_the_source_for_every_kind(make: Make) -> None:
    batch, source = make([7, 6]), make([3, 8, 0])
    rows = [7, 6, 3, 8, 0, 3, 8, 0, 3]
    for num_rows in range(2, 10):
        assert same(pad_rows(batch, num_rows, source), make(rows[:num_rows]))
    assert same([batch, source], [make([7, 6]), make([3, 8, 0])])


def test_a_batch_may_be_filled_from_itself(make: Make) -> None:
    batch = make([7, 6, 2])
    assert same(pad_rows(batch, 5, batch), make([7, 6, 2, 7, 6]))


@pytest.mark.parametrize("kind", sorted(ROW_KINDS.keys() - {"jagged", "packed"}))
def test_no_rows_are_rows_too(kind: str) -> None:
    batch = {"anchor": torch.tensor([3, 8]), "it": ROW_KINDS[kind]([3, 8])}
    nothing = slice_rows(batch, slice(2, 2))
    assert count_rows(nothing) == 0
    assert same(join_rows([nothing, batch]), batch)
    assert same(join_rows([batch, nothing]), batch)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_the_older_layout_are_cut_and_joined() -> None:
    batch = torch.nested.nested_tensor([ragged(1), ragged(2), ragged(3)])
    parts = [slice_rows(batch, slice(0, 1)), slice_rows(batch, slice(1, 3))]
    assert [count_rows(part) for part in parts] == [1, 2]
    assert same(join_rows(parts), batch)


def test_cut_tensors_are_views() -> None:
    batch = torch.arange(6)
    assert slice_rows(batch, slice(2, 4)).data_ptr() == batch[2:].data_ptr()


# What belongs to the whole batch.

WHOLE_VALUES = [
    torch.tensor(2.5),
    np.float32(1.5),
    np.array(3),
    float("nan"),
    "train",
    b"raw",
    None,
    True,
    7,
    1j,
    THING,
    {1, 2, 3, 4},
    torch.Size([2, 2, 2, 2]),
    ["cat", "dog", "bird"],
    ("p", "q", "r", "s", "t"),
    {"nested": [{"lr": 0.1}]},
    {},
]


@pytest.mark.parametrize("value", WHOLE_VALUES, ids=repr)
def test_what_carries_no_rows_goes_along_with_every_part(value: object) -> None:
    batch = {"x": torch.arange(4), "value": value}
    parts = [slice_rows(batch, slice(0, 2)), take_rows(batch, [2, 3])]
    for part in parts:
        assert repr(part["value"]) == repr(value)
    assert repr(join_rows([batch, batch])["value"]) == repr(value)
    assert repr(join_rows(copy.deepcopy([batch, batch]))["value"]) == repr(value) or value is THING
    assert repr(pad_rows(batch, 6, batch)["value"]) == repr(value)


@pytest.mark.parametrize("value", ["a", None, 3, {"a": 1}, {}, torch.tensor(1), THING], ids=repr)
def test_a_batch_without_rows_is_left_as_it_is(value: object) -> None:
    assert count_rows(value) is None
    assert count_rows(value, expected=3) is None
    assert slice_rows(value, slice(0, 1)) is value
    assert take_rows(value, [5]) is value
    assert pad_rows(value, 8, value) is value
    assert same(join_rows([value, value]), value)


def test_padding_keeps_the_values_of_the_batch_that_is_filled() -> None:
    short = {"x": torch.tensor([1]), "file": "b", "classes": ["p", "q"]}
    full = {"x": torch.tensor([5, 6]), "file": "a", "classes": ["p", "q"]}
    # In the full batch alone, the classes could be taken for rows.
    assert same(
        pad_rows(short, 3, full), {"x": torch.tensor([1, 5, 6]), "file": "b", "classes": ["p", "q"]}
    )


# Counting.


@dataclass
class Pair:
    x: object
    y: object


class Point(NamedTuple):
    x: object
    y: object


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


COUNTS: list[tuple[object, int | None, int]] = [
    # batch, expected, rows
    (zeros(5), None, 5),
    (zeros(0, 3), None, 0),
    ([zeros(2, 3), zeros(2)], None, 2),
    ((zeros(4), [zeros(4), "train"]), None, 4),
    ({"x": zeros(2), "names": ["a", "b", "c"]}, None, 2),
    (Pair(zeros(3), Point(zeros(3), None)), None, 3),
    (["a", "b", "c"], None, 3),
    ([], None, 0),
    ({"a": [], "b": ["x"]}, None, 1),
    ([["a", "b"], ["c", "d"], ["e", "f"]], None, 2),
    ({"id": ["x", "y"], "tokens": [["a"], ["b", "c", "d"]]}, None, 2),
    ({"x": zeros(2), "boxes": [zeros(3, 4), zeros(5, 4)]}, None, 2),
    ({"boxes": [zeros(3, 4), zeros(5, 4)], "x": zeros(2)}, None, 2),
    ((zeros(2), ({"boxes": zeros(3, 4)}, {"boxes": zeros(2, 4)})), None, 2),
    # One entry for each sample, which only the caller can know.
    ([zeros(3, 8), zeros(3, 6)], None, 3),
    ([zeros(3, 8), zeros(3, 6)], 2, 2),
    (((zeros(3, 8), zeros(3, 6)), ({"boxes": zeros(1, 4)}, {"boxes": zeros(9, 4)})), 2, 2),
    ([["a"], ["b", "c", "d"]], 2, 2),
    ((["a", "b"], ["c", "d", "e"]), 3, 3),
    # Where both readings are possible the entries are fields.
    ([zeros(2, 8), zeros(2, 6)], 2, 2),
]


@pytest.mark.parametrize(("batch", "expected", "rows"), COUNTS)
def test_rows_are_counted(batch: object, expected: int | None, rows: int) -> None:
    assert count_rows(batch, expected=expected) == rows


MUST = "; all leaves must have the same first dimension."
DISAGREEMENTS: list[tuple[object, int | None, str]] = [
    ({"label": zeros(8), "pixels": zeros(7, 3)}, None, "'pixels' has 7 samples but 'label' has 8"),
    ((zeros(2), zeros(3)), None, "'1' has 3 samples but '0' has 2"),
    ([zeros(4), [zeros(3), zeros(4)]], None, "'1.0' has 3 samples but '0' has 4"),
    (Pair(zeros(4), {"a": np.zeros(5)}), None, "'y.a' has 5 samples but 'x' has 4"),
    (Point(zeros(4), zeros(1)), None, "'y' has 1 samples but 'x' has 4"),
    ({"a": ["x"], "b": ["y", "z"]}, None, "'b' has 2 samples but 'a' has 1"),
    ([["a"], ["b", "c"]], None, "'1' has 2 samples but '0' has 1"),
    ({"x": zeros(7)}, 8, "'x' has 7 samples but `expected` is 8"),
]


@pytest.mark.parametrize(("batch", "expected", "message"), DISAGREEMENTS)
def test_leaves_that_disagree_are_named(batch: object, expected: int | None, message: str) -> None:
    wanted = f"Batch leaf {message}{MUST}"
    assert message_of(lambda: count_rows(batch, expected=expected)) == wanted
    assert message_of(lambda: slice_rows(batch, slice(1), expected=expected)) == wanted
    assert message_of(lambda: take_rows(batch, [0], expected=expected)) == wanted
    assert message_of(lambda: join_rows([batch] * 2, expected=[expected] * 2)) == wanted
    assert message_of(lambda: pad_rows(batch, 9, batch, expected=expected)) == wanted
    source = zeros(expected or 4)
    assert message_of(lambda: pad_rows(source, 9, batch, source_expected=expected)) == wanted


def test_a_bare_tensor_that_is_not_as_long_as_expected_is_an_error() -> None:
    assert message_of(lambda: count_rows(zeros(7), expected=8)) == (
        f"The batch has 7 samples but `expected` is 8{MUST}"
    )


def test_a_list_of_samples_is_cut_by_sample_if_their_number_is_known() -> None:
    images, sizes = [zeros(3, 8, 8), zeros(3, 4, 4)], ["large", "small"]
    first = slice_rows([*zip(images, sizes, strict=True)], slice(0, 1), expected=2)
    assert same(first, [(zeros(3, 8, 8), "large")])
    assert same(take_rows(images, [1, 0], expected=2), [images[1], images[0]])
    both = join_rows([images, [zeros(3, 2, 2)]], expected=[2, 1])
    assert same(both, [*images, zeros(3, 2, 2)])
    padded = pad_rows([zeros(3, 2, 2)], 4, images, expected=1, source_expected=2)
    assert same(padded, [zeros(3, 2, 2), *images, images[0]])


def test_one_batch_shows_how_a_list_is_meant_in_the_others() -> None:
    # The first list could be two fields of two rows each; the second cannot.
    one: dict[str, Any] = {"x": torch.arange(2), "boxes": [zeros(2, 4), zeros(2, 4)]}
    two = {"x": torch.arange(1), "boxes": [zeros(5, 4)]}
    assert [len(box) for box in join_rows([one, two])["boxes"]] == [2, 2, 5]


def test_what_default_collate_makes_is_read_as_it_was_meant() -> None:
    samples = [(torch.full((3,), row), {"name": f"n{row}", "pair": (row, "k")}) for row in range(4)]
    for start in range(4):
        for stop in range(start + 1, 5):
            part = slice_rows(default_collate(samples), slice(start, stop))
            assert same(part, default_collate(samples[start:stop]))


def test_positions_must_be_rows_of_the_batch() -> None:
    for position in (4, -1):
        call = lambda at=position: take_rows(torch.arange(4), [0, at])  # noqa: E731
        assert message_of(call) == f"`positions` must be in [0, 4), got {position}."


# Joining what does not join.

UNJOINABLE = [
    (
        {"x": zeros(2, 3)},
        {"x": zeros(1, 4)},
        "Batch leaf 'x' cannot be joined: torch.strided rows of torch.float32 and shape (3,) on"
        " cpu meet torch.strided rows of torch.float32 and shape (4,) on cpu.",
    ),
    (
        (zeros(2), torch.arange(2)),
        (zeros(2), zeros(2)),
        "Batch leaf '1' cannot be joined: torch.strided rows of torch.int64 and shape () on cpu"
        " meet torch.strided rows of torch.float32 and shape () on cpu.",
    ),
    (
        zeros(2),
        torch.zeros(2, device=META),
        "The batch cannot be joined: torch.strided rows of torch.float32 and shape () on cpu"
        " meet torch.strided rows of torch.float32 and shape () on meta.",
    ),
    (
        [np.zeros(2)],
        [np.zeros(2, dtype=np.int64)],
        "Batch leaf '0' cannot be joined: array rows of float64 and shape () meet array rows of"
        " int64 and shape ().",
    ),
    (
        jagged([1]),
        jagged([2]).double(),
        "The batch cannot be joined: nested rows of torch.float32 on cpu meet nested rows of"
        " torch.float64 on cpu.",
    ),
    (
        pack_sequence([zeros(2)]),
        pack_sequence([zeros(2, 5)]),
        "The batch cannot be joined: packed rows of torch.float32 and shape () on cpu meet packed"
        " rows of torch.float32 and shape (5,) on cpu.",
    ),
    (
        {"x": zeros(2), "y": zeros(2)},
        {"x": zeros(2)},
        "The batch cannot be joined: it is built differently in each batch.",
    ),
    (
        {"x": [zeros(2)]},
        {"x": (zeros(2),)},
        "Batch leaf 'x' cannot be joined: it is built differently in each batch.",
    ),
    (
        {"x": zeros(2), "y": zeros(2)},
        {"x": zeros(2), "y": 1.0},
        "Batch leaf 'y' cannot be joined: it is built differently in each batch.",
    ),
    (
        {"x": zeros(2), "y": torch.ones(2)},
        {"x": zeros(2), "y": torch.tensor(1)},
        "Batch leaf 'y' belongs to the whole batch and cannot be joined:"
        " tensor([1., 1.]) differs from tensor(1).",
    ),
    (
        {"x": zeros(2), "width": 17},
        {"x": zeros(2), "width": 23},
        "Batch leaf 'width' belongs to the whole batch and cannot be joined: 17 differs from 23.",
    ),
    (
        {"x": zeros(2), "scale": torch.tensor(1)},
        {"x": zeros(2), "scale": torch.tensor(2)},
        "Batch leaf 'scale' belongs to the whole batch and cannot be joined:"
        " tensor(1) differs from tensor(2).",
    ),
    (
        {"x": zeros(3), "classes": ["a", "b"]},
        {"x": zeros(3), "classes": ["a", "c"]},
        "Batch leaf 'classes.1' belongs to the whole batch and cannot be joined:"
        " 'b' differs from 'c'.",
    ),
]


@pytest.mark.parametrize(("one", "other", "message"), UNJOINABLE)
def test_what_does_not_join_is_named(one: object, other: object, message: str) -> None:
    assert message_of(lambda: join_rows([one, other])) == message
    if "whole batch" not in message:
        assert message_of(lambda: pad_rows(one, 3, other)) == message


def test_not_a_number_equals_itself() -> None:
    parts: list[dict[str, Any]]
    parts = [{"x": zeros(1), "a": float("nan"), "b": torch.tensor(torch.nan)} for _ in range(2)]
    assert torch.isnan(join_rows(parts)["b"])
    parts[1]["a"] = 1.0
    assert message_of(lambda: join_rows(parts)) == (
        "Batch leaf 'a' belongs to the whole batch and cannot be joined: nan differs from 1.0."
    )


def test_values_that_compare_oddly_are_unequal() -> None:
    class Vague:
        def __eq__(self, other: object) -> Any:
            return "maybe"

        def __hash__(self) -> int:
            return 0

        def __repr__(self) -> str:
            return "vague"

    parts = [{"x": zeros(1), "v": Vague()} for _ in range(2)]
    assert message_of(lambda: join_rows(parts)) == (
        "Batch leaf 'v' belongs to the whole batch and cannot be joined: vague differs from vague."
    )


@pytest.mark.filterwarnings("ignore:Sparse")
def test_layouts_that_torch_does_not_cut_are_named() -> None:
    csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2))
    wanted = (
        "Batch leaf 'x' cannot be cut or joined: its layout is torch.sparse_csr."
        " Collate a dense or sparse COO tensor."
    )
    assert count_rows(csr) == 2
    assert message_of(lambda: slice_rows({"x": csr}, slice(0, 1))) == wanted
    assert message_of(lambda: join_rows([{"x": csr}, {"x": csr}])) == wanted


def test_a_packed_sequence_of_nothing_cannot_be() -> None:
    packed = pack_sequence([zeros(2), zeros(1)])
    assert message_of(lambda: slice_rows((packed,), slice(0, 0))).startswith(
        "Batch leaf '0' cannot be put together: "
    )


def test_there_must_be_something_to_join() -> None:
    assert message_of(lambda: join_rows([])) == "`batches` must hold at least one batch, got none."
    assert message_of(lambda: join_outputs([], list)) == (
        "`outputs` must hold at least one entry, got none."
    )
    batch = {"x": zeros(2)}
    assert join_rows([batch]) is batch


def test_padding_refuses_what_it_cannot_do() -> None:
    assert message_of(lambda: pad_rows(zeros(4), 3, zeros(4))) == (
        "`num_rows` must be at least the 4 rows at hand, got 3."
    )
    for source in (zeros(0), torch.tensor(1.0)):
        assert message_of(lambda source=source: pad_rows(zeros(4), 6, source)) == (  # type: ignore[misc]
            "`source` must have rows to fill the batch with, got none."
        )
    batch = zeros(4)
    assert pad_rows(batch, 4, zeros(0)) is batch


# Containers stay what they are.


class Encoding(UserDict[str, object]):
    """Like the output of a tokenizer: a mapping by inheritance, that moves itself in place."""

    def __init__(self, data: dict[str, object], source: str) -> None:
        super().__init__(data)
        self.source = source

    def to(self, device: torch.device) -> Encoding:
        self.data = {key: move_to_device(value, device) for key, value in self.data.items()}
        return self


class Attributes(dict[str, object]):
    """Items that are attributes too."""

    def __init__(self, *args: object, **items: object) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


class Sized(list[object]):
    def __init__(self, values: list[object], *, size: int) -> None:
        super().__init__(values)
        self.size = size


class Doubled(tuple[object, ...]):
    __slots__ = ()


class Odd(namedtuple("Odd", ["x", "rest"])):
    """A namedtuple that is not made from its fields."""

    __slots__ = ()

    def __new__(cls, everything: tuple[object, object]) -> Odd:
        return super().__new__(cls, *everything)


@dataclass(frozen=True)
class Once:
    """May be made once; its fields are checked then, and only then."""

    x: Tensor
    rest: object
    made: set[str]
    rows: int = field(init=False)
    late: str = field(init=False)

    def __post_init__(self) -> None:
        assert not self.made, "made again"
        self.made.add("once")
        object.__setattr__(self, "rows", len(self.x))


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    rest: object


class Window(Mapping[str, object]):
    """A mapping of one's own: a shallow copy of it would share its storage."""

    def __init__(self, items: Mapping[str, object]) -> None:
        self.items_ = dict(items)

    def __getitem__(self, key: str) -> object:
        return self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)


def default_dict(items: dict[str, object]) -> defaultdict[str, object]:
    return defaultdict(list, items)


CONTAINERS: dict[str, Callable[[Tensor, object], Any]] = {
    "dict": lambda x, rest: {"x": x, "rest": rest},
    "ordered": lambda x, rest: OrderedDict(rest=rest, x=x),
    "default": lambda x, rest: default_dict({"x": x, "rest": rest}),
    "user": lambda x, rest: Encoding({"x": x, "rest": rest}, "corpus"),
    "attributes": lambda x, rest: Attributes(x=x, rest=rest),
    "read-only": lambda x, rest: MappingProxyType({"x": x, "rest": rest}),
    "own mapping": lambda x, rest: Window({"x": x, "rest": rest}),
    "list": lambda x, rest: [x, rest],
    "own list": lambda x, rest: Sized([x, rest], size=9),
    "user list": lambda x, rest: UserList([x, rest]),
    "deque": lambda x, rest: deque([x, rest], maxlen=7),
    "tuple": lambda x, rest: (x, rest),
    "own tuple": lambda x, rest: Doubled([x, rest]),
    "namedtuple": Point,
    "odd namedtuple": lambda x, rest: Odd((x, rest)),
    "dataclass": Pair,
    "frozen": lambda x, rest: Once(x, rest, set()),
    "slotted": Slotted,
}


def parts_of(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch["x"], batch["rest"]
    if is_dataclass(batch):
        return tuple(getattr(batch, each.name) for each in fields(batch)[:2])
    return tuple(batch)


OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    # name: what is done to the batch, and what must have been done to each of its tensors
    "slice": (lambda batch: slice_rows(batch, slice(1, 3)), lambda x: x[1:3]),
    "take": (lambda batch: take_rows(batch, [3, 0]), lambda x: x[[3, 0]]),
    "join": (lambda batch: join_rows([batch, batch]), lambda x: torch.cat([x, x])),
    "pad": (lambda batch: pad_rows(batch, 5, batch), lambda x: x[[0, 1, 2, 3, 0]]),
    "trim": (lambda batch: trim_outputs(batch, 1, 4), lambda x: x[:1]),
    "move": (lambda batch: move_to_device(batch, "meta"), lambda x: x.to("meta")),
    "map": (
        lambda batch: map_leaves(lambda x: -x if isinstance(x, Tensor) else x, batch),
        lambda x: -x,
    ),
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("container", CONTAINERS)
def test_containers_are_kept_and_never_changed(container: str, operation: str) -> None:
    apply, of_tensor = OPERATIONS[operation]
    x, y = torch.arange(4), torch.arange(8).reshape(4, 2)
    batch = CONTAINERS[container](x, {"y": [y, "flag"]})
    result = apply(batch)
    assert type(result) is type(batch)
    assert result is not batch
    new_x, rest = parts_of(result)
    assert type(rest) is dict
    for one, original in ((new_x, x), (rest["y"][0], y)):
        wanted = of_tensor(original)
        assert one.device == wanted.device
        assert one.shape == wanted.shape
        assert one.is_meta or torch.equal(one, wanted)
    assert rest["y"][1] == "flag"
    old_x, old_rest = parts_of(batch)
    assert old_x is x
    assert old_rest["y"][0] is y


def test_what_containers_hold_besides_their_items_is_kept() -> None:
    x = torch.arange(4)

    def cut(container: str) -> Any:
        return slice_rows(CONTAINERS[container](x, None), slice(0, 2))

    assert cut("user").source == "corpus"
    assert cut("own list").size == 9
    assert cut("deque").maxlen == 7
    assert cut("default").default_factory is list
    assert list(cut("ordered")) == ["rest", "x"]
    assert torch.equal(cut("attributes").x, x[:2])
    once = cut("frozen")
    assert (once.made, once.rows) == ({"once"}, 4)
    with pytest.raises(FrozenInstanceError):
        once.x = x


def test_a_container_that_cannot_be_made_again_is_named() -> None:
    class Sealed(Window):
        def __init__(self) -> None:
            super().__init__({"x": torch.arange(2)})

    class Fixed(dict[str, object]):
        def __setitem__(self, key: str, value: object) -> None:
            raise TypeError("Fixed is fixed")

    assert message_of(lambda: slice_rows(Sealed(), slice(0, 1))).startswith(
        "A batch container of type Sealed cannot be made again with other values: "
    )
    assert message_of(lambda: slice_rows(Fixed(x=torch.arange(2)), slice(0, 1))) == (
        "A batch container of type Fixed cannot be made again with other values: Fixed is fixed."
        " Give it a constructor that takes them, or use a dict, list or dataclass."
    )


def test_a_deque_must_have_room() -> None:
    batch = {"x": torch.arange(2), "names": deque(["a", "b"], maxlen=3)}
    assert message_of(lambda: join_rows([batch, batch])) == (
        "A batch container of type deque must hold 4 entries, holds 3. Use a list."
    )


def test_leaves_come_with_their_paths() -> None:
    x, made = torch.arange(2), set[str]()
    batch = {"a": [x, ("b", Point(None, {3: b"c"}))], "d": Once(x, THING, made), "e": {}}
    assert [*leaves(batch)] == [
        ("a.0", x),
        ("a.1.0", "b"),
        ("a.1.1.x", None),
        ("a.1.1.y.3", b"c"),
        ("d.x", x),
        ("d.rest", THING),
        ("d.made", made),
        ("d.rows", 2),
    ]
    assert [*leaves(THING)] == [("", THING)]
    seen: list[object] = []
    map_leaves(seen.append, batch)
    assert seen == [leaf for _, leaf in leaves(batch)]
    classes = [Pair, Tensor]
    assert [leaf for _, leaf in leaves(classes)] == classes


def test_arrays_are_plain_values_where_numpy_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(3)
    monkeypatch.delitem(sys.modules, "numpy")
    assert count_rows(array) is None
    assert slice_rows({"x": torch.arange(4), "a": array}, slice(0, 2))["a"] is array


# Any nesting.


@dataclass(frozen=True)
class Nested:
    """A batch, and the same batch cut by hand."""

    batch: Any
    cut: Callable[[slice], Any]


MOST_ROWS = 6


@st.composite
def row_leaves(draw: st.DrawFn, rows: int) -> Nested:
    kind = draw(st.sampled_from(["tensor", "matrix", "array", "strings", "tuple"]))
    start = draw(st.integers(0, 99))
    numbers = list(range(start, start + rows))
    value: Any = {
        "tensor": torch.tensor(numbers, dtype=torch.int64),
        "matrix": torch.tensor(numbers, dtype=torch.float32).reshape(rows, 1).expand(rows, 3),
        "array": np.array(numbers, dtype=np.int64),
        "strings": [str(number) for number in numbers],
        "tuple": tuple(number / 3 for number in numbers),
    }[kind]
    return Nested(value, lambda part: value[part])


# The list is longer than any batch here, also a filled one, so that it is never one of rows.
whole_values = st.sampled_from([None, True, 7, "train", b"raw", ["word"] * (2 * MOST_ROWS + 1)])

CONTAINERS_OF_MANY: list[Callable[[list[Any]], Any]] = [
    list,
    tuple,
    UserList,
    Doubled,
    lambda values: dict(enumerate(values)),
    lambda values: OrderedDict((str(i), value) for i, value in enumerate(values)),
    lambda values: UserDict(enumerate(values)),
    lambda values: Point(values[0], values[1:]),
    lambda values: Pair(values[0], tuple(values[1:])),
]


@st.composite
def containers(draw: st.DrawFn, rows: int, children: st.SearchStrategy[Nested]) -> Nested:
    inside = draw(st.lists(children, min_size=1, max_size=3))
    # A tensor within makes a list a container of fields.
    numbers = torch.arange(rows)
    inside.append(Nested(numbers, lambda part: numbers[part]))
    make = draw(st.sampled_from(CONTAINERS_OF_MANY))
    return Nested(
        make([child.batch for child in inside]),
        lambda part: make([child.cut(part) for child in inside]),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, Nested]:
    rows = draw(st.integers(0, MOST_ROWS))
    leaf = row_leaves(rows) | whole_values.map(lambda value: Nested(value, lambda _: value))
    nested = st.recursive(leaf, lambda inner: containers(rows, inner), max_leaves=5)
    return rows, draw(containers(rows, nested))


@settings(deadline=None)
@given(batches(), st.data())
def test_any_nesting_is_cut_as_its_leaves_are_and_joins_again(
    drawn: tuple[int, Nested], data: st.DataObject
) -> None:
    rows, nested = drawn
    batch, before = nested.batch, copy.deepcopy(nested.batch)
    assert count_rows(batch) == count_rows(batch, expected=rows) == rows

    points = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    bounds = [0, *points, rows]
    cuts = [slice(*pair) for pair in pairwise(bounds)]
    parts = [slice_rows(batch, cut) for cut in cuts]
    for part, cut in zip(parts, cuts, strict=True):
        assert same(part, nested.cut(cut))
        positions = list(range(rows))[cut]
        assert same(take_rows(batch, positions), nested.cut(cut))
    assert same(join_rows(parts), batch)

    if rows:
        longer = pad_rows(parts[0], rows + cuts[0].stop, batch)
        assert same(slice_rows(longer, slice(cuts[0].stop)), parts[0])
        assert same(slice_rows(longer, slice(cuts[0].stop, None)), batch)
    assert same(batch, before)


# Outputs of a model: leaves with several rows for each sample.


def test_outputs_keep_what_was_made_of_the_first_rows() -> None:
    outputs: dict[str, Any] = {
        "one": torch.arange(4),
        "three": torch.arange(12),
        "none": torch.tensor(0.5),
        "words": ["a", "b", "c", "d", "e", "f", "g", "h"],
        "boxes": [ragged(row) for row in range(4)],
        "step": 7,
    }
    kept = trim_outputs(outputs, 3, 4)
    assert same(kept["one"], torch.arange(3))
    assert same(kept["three"], torch.arange(9))
    assert same(kept["none"], torch.tensor(0.5))
    assert kept["words"] == ["a", "b", "c", "d", "e", "f"]
    assert same(kept["boxes"], [ragged(row) for row in range(3)])
    assert kept["step"] == 7
    assert trim_outputs(outputs, 4, 4) is outputs
    assert len(trim_outputs(outputs, 0, 4)["boxes"]) == 0
    nothing = zeros(0)
    assert trim_outputs(nothing, 0, 0) is nothing


def test_the_outermost_tuple_of_outputs_is_never_one_of_rows() -> None:
    # Two outputs of three rows for each of two samples: not two samples.
    pair = (torch.arange(6), torch.arange(6) * 2)
    assert same(trim_outputs(pair, 1, 2), (torch.arange(3), torch.arange(3) * 2))
    joined = join_outputs([pair, pair], list, num_rows=[2, 2])
    assert same(joined, tuple(torch.cat([part, part]) for part in pair))


def test_outputs_must_fit_the_rows_of_the_batch() -> None:
    fit = "rows for the 4 rows of the batch; it must have a multiple of them."
    for valid_rows in (3, 4):
        assert message_of(lambda: trim_outputs({"x": zeros(6)}, valid_rows, 4)) == (  # noqa: B023
            f"Batch leaf 'x' has 6 {fit}"
        )
    assert message_of(lambda: trim_outputs(["a"], 1, 4)) == f"The batch has 1 {fit}"
    assert message_of(lambda: trim_outputs((zeros(4), zeros(3)), 1, 2)) == (
        "Batch leaf '1' has 3 rows for the 2 rows of the batch; it must have a multiple of them."
    )
    for valid_rows in (-1, 5):
        assert message_of(lambda: trim_outputs(zeros(4), valid_rows, 4)) == (  # noqa: B023
            f"`valid_rows` must be in [0, 4], got {valid_rows}."
        )


def test_outputs_of_several_ranks_join_leaf_by_leaf() -> None:
    ranks = [
        {"y": torch.arange(2), "wide": zeros(2, 3), "words": ["a"], "loss": torch.tensor(1.0)},
        {"y": torch.arange(3), "wide": zeros(3, 4), "words": [], "loss": torch.tensor(1.0)},
        {"y": torch.arange(0), "wide": zeros(0, 4), "words": ["b", "c"], "loss": torch.tensor(3.0)},
    ]
    joined = join_outputs(ranks, lambda parts: ("apart", *parts))
    assert same(joined["y"], torch.tensor([0, 1, 0, 1, 2]))
    assert same(joined["words"], ["a", "b", "c"])
    assert same(joined["wide"], ("apart", zeros(2, 3), zeros(3, 4), zeros(0, 4)))
    assert same(joined["loss"], ("apart", *(torch.tensor(loss) for loss in (1.0, 1.0, 3.0))))


def test_outputs_with_a_tensor_for_each_sample_join_by_sample() -> None:
    ranks: list[dict[str, Any]] = [
        {"boxes": [zeros(3, 4), zeros(1, 4)]},
        {"boxes": [zeros(2, 4)]},
        {"boxes": []},
    ]
    joined = join_outputs(ranks, list, num_rows=[2, 1, 0])
    assert [len(box) for box in joined["boxes"]] == [3, 1, 2]
    assert message_of(lambda: join_outputs(ranks, list)) == (
        "Batch leaf 'boxes' cannot be joined: it is built differently in each batch."
    )


# Moving.


@pytest.mark.parametrize("device", ["meta", META])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_every_tensor_moves_and_nothing_else(
    device: str | torch.device, non_blocking: bool
) -> None:
    array = np.arange(2)
    batch: dict[str, Any] = {
        "x": (zeros(2), [torch.nn.Parameter(zeros(3)), {"deep": torch.tensor(1)}]),
        "sparse": torch.eye(2).to_sparse(),
        "rest": ["a", b"b", None, 1, 2.0, True, array, THING, Tensor],
        "packed": pack_sequence([zeros(2), zeros(1)]),
    }
    moved = move_to_device(batch, device, non_blocking=non_blocking)
    tensors = [leaf for _, leaf in leaves(moved) if isinstance(leaf, Tensor)]
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 4
    packed = moved["packed"]
    assert isinstance(packed, PackedSequence)
    assert (packed.data.device.type, packed.batch_sizes.device.type) == ("meta", "cpu")
    assert all(one is other for one, other in zip(moved["rest"], batch["rest"], strict=True))


def test_tensors_that_are_there_are_the_same_objects() -> None:
    tensors = [zeros(2), torch.nn.Parameter(zeros(3))]
    for batch in (tensors, tuple(tensors), {0: tensors[0], 1: tensors[1]}, Point(*tensors)):
        moved = move_to_device(batch, "cpu")
        assert type(moved) is type(batch)
        assert [id(leaf) for _, leaf in leaves(moved)] == [id(tensor) for tensor in tensors]
    assert move_to_device(tensors[0], "cpu") is tensors[0]


class Graph:
    """Moves itself, and writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def to(self, *where: object, **options: object) -> Graph:
        self.asked.append((*where, options))
        return self


class Plain(Graph):
    def to(self, device: object) -> Graph:  # type: ignore[override]
        self.asked.append((device,))
        return self


class Keyword(Graph):
    def to(self, device: object, non_blocking: bool = False) -> Graph:  # type: ignore[override]
        self.asked.append((device, non_blocking))
        return self


class Silent(Graph):
    def to(self, device: object) -> None:  # type: ignore[override]
        self.asked.append((device, "silent"))


@pytest.mark.parametrize(
    ("kind", "blocking", "non_blocking"),
    [
        (Graph, (META, {}), (META, {"non_blocking": True})),
        (Keyword, (META, False), (META, True)),
        (Plain, (META,), (META,)),
        (Silent, (META, "silent"), (META, "silent")),
    ],
)
def test_objects_that_move_themselves_are_asked(
    kind: type[Graph], blocking: tuple[object, ...], non_blocking: tuple[object, ...]
) -> None:
    graph = kind()
    assert move_to_device([graph], "meta")[0] is graph
    assert move_to_device({"g": graph}, META, non_blocking=True)["g"] is graph
    assert graph.asked == [blocking, non_blocking]
    assert count_rows([zeros(3), graph]) == 3


def test_a_signature_that_cannot_be_read_gets_the_device_alone() -> None:
    class Named:
        to = str

    assert move_to_device(Named(), "meta", non_blocking=True) == "meta"  # type: ignore[comparison-overlap]


def test_a_field_or_an_item_called_to_is_no_method() -> None:
    class Route(NamedTuple):
        start: Tensor
        to: Tensor

    moved_route = move_to_device(Route(zeros(1), zeros(2)), "meta")
    assert [end.device for end in moved_route] == [META, META]
    moved = move_to_device(Attributes(to=zeros(2)), "meta")
    assert moved["to"].device == META  # type: ignore[attr-defined]


def test_a_container_that_moves_in_place_is_moved_as_a_copy() -> None:
    x = zeros(2)
    encoding = Encoding({"x": x}, "corpus")
    moved = move_to_device(encoding, "meta")
    assert (type(moved), moved.source) == (Encoding, "corpus")
    assert moved["x"].device == META  # type: ignore[attr-defined]
    assert encoding["x"] is x
