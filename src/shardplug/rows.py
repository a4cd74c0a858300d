"""Nested batches: measure, cut, join, fill up, and move to a device.

A batch is a tree of containers (mappings, lists, tuples, namedtuples, dataclasses) and leaves. Some
of it carries rows, one for each sample; the rest belongs to the whole batch and goes along with
every part of it. `count_rows` tells which is which. Containers keep their type, and what the caller
passes in is never changed.
"""

from __future__ import annotations

import copy
import inspect
import reprlib
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import NamedTuple, Protocol, TypeGuard, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from shardplug.errors import BatchError

_Batch = TypeVar("_Batch")
_Item = TypeVar("_Item")

_PLAIN_TYPES = frozenset({str, bytes, int, float, complex, bool, type(None)})
_ABSENT = object()


class _Dtype(Protocol):
    @property
    def kind(self) -> str: ...


class _Array(Protocol):
    """What is used of a numpy array; numpy itself is never imported here."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> _Dtype: ...

    def __getitem__(self, rows: slice | list[int], /) -> object: ...


class _NamedTuple(Protocol):
    _fields: tuple[str, ...]

    def __iter__(self) -> Iterator[object]: ...

    def _make(self, values: Iterable[object], /) -> object: ...


class _Movable(Protocol):
    def to(self, device: torch.device, **options: bool) -> object: ...


def map_leaves(f: Callable[[object], object], batch: _Batch) -> _Batch:
    """Apply ``f`` to every leaf and rebuild the containers around the results.

    Args:
        f: Takes a leaf, gives its replacement.
        batch: Any nesting.

    Returns:
        A batch of the same containers.

    Raises:
        BatchError: If a container cannot be rebuilt.

    Example:
        >>> map_leaves(str, {"a": 1, "b": (2, [3])})
        {'a': '1', 'b': ('2', ['3'])}
    """
    children = _children(batch)
    if children is None:
        return cast("_Batch", f(batch))
    return cast("_Batch", _rebuild(batch, [(key, map_leaves(f, child)) for key, child in children]))


def leaves(batch: object) -> Iterator[tuple[str, object]]:
    """Walk over the leaves, in the order in which `map_leaves` visits them.

    Args:
        batch: Any nesting.

    Yields:
        The path of a leaf, its keys joined by dots (empty for a batch that is itself a leaf),
        and the leaf.

    Example:
        >>> list(leaves({"a": 1, "b": (2, [3])}))
        [('a', 1), ('b.0', 2), ('b.1.0', 3)]
    """
    return _walk(batch, "")


def count_rows(batch: object, *, expected: int | None = None) -> int | None:
    """Count the samples in a batch.

    These carry rows:

    * tensors and numpy arrays with at least one dimension: the first one counts samples;
    * packed sequences;
    * lists and tuples without anything of the above in them, when they are as long as the batch:
      ``default_collate`` makes such a list of the strings of a field. A list of another length
      belongs to the whole batch (two class names in a batch of two cannot be told from rows). Of
      lists within lists the innermost count;
    * lists and tuples as long as the batch whose tensors do not all have that many rows: one tensor
      (or dict of tensors) for each sample, of any shape. If all of them have that many rows the
      list is a container of fields, as ``default_collate`` makes it.

    Everything else belongs to the whole batch: tensors without dimensions, numbers, strings, flags,
    None, objects of other types.

    The tensors within the fewest lists say how many samples there are; without tensors the
    lists do. That a bare list of tensors, or of dicts, has one entry for each sample cannot be seen
    when their first dimensions agree by chance; ``expected`` settles it, but for one case: a
    list of ``expected`` entries of ``expected`` rows each is read as a container of fields.

    Args:
        batch: Any nesting.
        expected: The number of samples, if the caller knows it (it drew them).

    Returns:
        The number of samples, or None if nothing in the batch carries rows.

    Raises:
        BatchError: If leaves disagree with each other or with ``expected``.

    Example:
        >>> count_rows({"x": torch.zeros(2, 3), "name": ["a", "b"], "classes": ["p", "q", "r"]})
        2
        >>> count_rows([torch.zeros(3, 8, 8), torch.zeros(3, 6, 4)], expected=2)
        2
    """
    marks = _marks(batch)
    tensors = [mark for mark in marks if mark.is_tensor]
    if expected is not None:
        _check(tensors, expected, f"`expected` is {expected}")
        carried = any(mark.length == expected or expected in mark.lists for mark in marks)
        return expected if carried else None
    # An empty list says something only where nothing else does.
    deciding = tensors or [mark for mark in marks if mark.length] or marks
    if not deciding:
        return None
    first = min(deciding, key=lambda mark: len(mark.lists))
    peers = [mark for mark in deciding if len(mark.lists) == len(first.lists)]
    against = f"{first.path!r} has {first.length}"
    for mark in peers:
        if mark.length != first.length:
            raise _disagreement(mark, against)
    _check(tensors, first.length, against)
    return first.length


def slice_rows(batch: _Batch, rows: slice, *, expected: int | None = None) -> _Batch:
    """Cut the same rows out of everything that carries rows.

    Tensors and arrays in the result are views where torch and numpy make views: sending one to
    another process by pickling sends the memory of the whole batch, unless it is cloned first.

    Args:
        batch: Any nesting.
        rows: Which rows, as for a list.
        expected: As for `count_rows`.

    Returns:
        A batch of the same containers. What belongs to the whole batch is in it as it is.

    Raises:
        BatchError: If leaves disagree on the number of rows, or torch cannot cut one of them.

    Example:
        >>> slice_rows({"x": torch.arange(4), "name": ["a", "b", "c", "d"]}, slice(1, 3))
        {'x': tensor([1, 2]), 'name': ['b', 'c']}
    """
    count = count_rows(batch, expected=expected)
    if count is None:
        return batch
    start, stop, step = rows.indices(count)
    # torch has no slices that go backwards.
    return _select(batch, count, rows if step > 0 else list(range(start, stop, step)))


def slice_tensors(
    data: _Batch,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> _Batch:
    """Cut the same rows out of everything in ``data`` that carries rows: `slice_rows`.

    It is the default ``slice_fn_for_dispatch``, and the signature of one.

    Args:
        data: Any nesting.
        tensor_slice: Which rows, as for a list.
        process_index: The shard that the rows are for; not used.
        num_processes: The number of shards; not used.

    Returns:
        A batch of the same containers.

    Raises:
        BatchError: If leaves disagree on the number of rows, or torch cannot cut one of them.

    Example:
        >>> slice_tensors([torch.arange(4), "train"], slice(0, 2))
        [tensor([0, 1]), 'train']
    """
    return slice_rows(data, tensor_slice)


def take_rows(batch: _Batch, positions: Sequence[int], *, expected: int | None = None) -> _Batch:
    """Pick rows by position, in any order and as often as asked for.

    Args:
        batch: Any nesting.
        positions: Rows, each in [0, rows of the batch).
        expected: As for `count_rows`.

    Returns:
        A batch of the same containers with ``len(positions)`` rows; the batch itself if it carries
        no rows.

    Raises:
        BatchError: If leaves disagree on the number of rows, a position is out of range, or torch
            cannot cut a leaf.

    Example:
        >>> take_rows((torch.arange(3), ["a", "b", "c"]), [2, 0, 2])
        (tensor([2, 0, 2]), ['c', 'a', 'c'])
    """
    count = count_rows(batch, expected=expected)
    if count is None:
        return batch
    for position in positions:
        if not 0 <= position < count:
            raise BatchError(f"`positions` must be in [0, {count}), got {position}.")
    return _select(batch, count, list(positions))


def join_rows(batches: Sequence[_Batch], *, expected: Sequence[int | None] | None = None) -> _Batch:
    """Put the rows of several batches, one after the other, into one: the inverse of cutting.

    What does not join (rows of another shape, dtype or device; other keys; values of the whole
    batch that differ) is a `BatchError`, and so is a batch that cannot be measured: a caller
    with another way out needs to catch only that.

    Args:
        batches: At least one; one alone comes back as it is.
        expected: The samples of each batch, as for `count_rows`.

    Returns:
        A batch of the same containers, holding copies of the rows.

    Raises:
        BatchError: If the batches cannot be joined; it names the leaf.

    Example:
        >>> join_rows([(torch.arange(2), ["a", "b"]), (torch.arange(1), ["c"])])
        (tensor([0, 1, 0]), ['a', 'b', 'c'])
    """
    if not batches:
        raise BatchError("`batches` must hold at least one batch, got none.")
    if len(batches) == 1:
        return batches[0]
    known = [None] * len(batches) if expected is None else expected
    counts = [
        count_rows(batch, expected=count) for batch, count in zip(batches, known, strict=True)
    ]
    joining = _Joining(counts=counts, value=_equal_value, ragged=_refuse)
    return cast("_Batch", _join(batches, "", joining))


def pad_rows(
    batch: _Batch,
    num_rows: int,
    source: _Batch,
    *,
    expected: int | None = None,
    source_expected: int | None = None,
) -> _Batch:
    """Fill a short batch with the rows of another, from its start, cycling.

    The added row j is row ``j % n`` of the ``n`` rows of ``source``. What belongs to the whole
    batch stays that of ``batch``.

    Args:
        batch: Any nesting.
        num_rows: Rows to fill up to, not fewer than the batch has.
        source: A batch of the same containers; it may be ``batch`` itself.
        expected: The samples of ``batch``, as for `count_rows`.
        source_expected: The samples of ``source``, likewise.

    Returns:
        A batch of ``num_rows`` rows; the batch itself if it has them already or carries none.

    Raises:
        BatchError: If the batch has more rows, ``source`` has none, or rows of the two do not join.

    Example:
        >>> pad_rows(torch.tensor([7]), 4, torch.tensor([0, 1]))
        tensor([7, 0, 1, 0])
    """
    count = count_rows(batch, expected=expected)
    if count is None or count == num_rows:
        return batch
    if num_rows < count:
        raise BatchError(f"`num_rows` must be at least the {count} rows at hand, got {num_rows}.")
    available = count_rows(source, expected=source_expected)
    if not available:
        raise BatchError("`source` must have rows to fill the batch with, got none.")
    fill = [row % available for row in range(num_rows - count)]
    joining = _Joining(
        counts=[count, available],
        value=_first_value,
        ragged=_refuse,
        picks=(slice(None), fill),
    )
    return cast("_Batch", _join([batch, source], "", joining))


def trim_outputs(outputs: _Batch, valid_rows: int, num_rows: int) -> _Batch:
    """Keep what a model made of the first ``valid_rows`` of the ``num_rows`` rows of a batch.

    Unlike a batch, outputs may have several rows for each sample: a tensor of ``k * num_rows`` rows
    keeps the first ``k * valid_rows``, each leaf with its own ``k``. Lists of plain values
    always carry rows.

    Args:
        outputs: Any nesting.
        valid_rows: Rows to keep, in [0, num_rows].
        num_rows: Rows of the batch that went in.

    Returns:
        The outputs in the same containers.

    Raises:
        BatchError: If a leaf does not have a multiple of ``num_rows`` rows, or torch cannot cut it.

    Example:
        >>> trim_outputs((torch.arange(6), ["a", "b"]), 1, 2)
        (tensor([0, 1, 2]), ['a'])
    """
    if not 0 <= valid_rows <= num_rows:
        raise BatchError(f"`valid_rows` must be in [0, {num_rows}], got {valid_rows}.")
    outermost = 1 if _is_field_tuple("", outputs) else 0
    for mark in _marks(outputs):
        if num_rows not in mark.lists[outermost:] and mark.length % max(num_rows, 1):
            raise BatchError(
                f"{_called(mark.path)} has {mark.length} rows for the {num_rows} rows of the batch;"
                " it must have a multiple of them."
            )
    if valid_rows == num_rows:
        return outputs

    def keep(path: str, node: object, length: int) -> object:
        return _take(path, node, slice(length // num_rows * valid_rows))

    return cast("_Batch", _map_rows(keep, outputs, "", num_rows, _is_per_row_output))


def join_outputs(
    outputs: Sequence[_Batch],
    otherwise: Callable[[list[object]], object],
    *,
    num_rows: Sequence[int] | None = None,
) -> _Batch:
    """Put the outputs of several ranks or steps, one after the other, into one.

    Unlike the leaves of a batch, each leaf has its own number of rows, and lists of plain values
    always carry rows.

    Args:
        outputs: At least one.
        otherwise: Decides on each leaf whose rows do not join (another shape, dtype or device) or
            that has no rows (numbers, strings, tensors without dimensions): takes its parts,
            gives what stands for them in the result.
        num_rows: The samples behind each of the outputs; only needed where these hold lists with
            one tensor for each sample.

    Returns:
        Outputs in the same containers.

    Raises:
        BatchError: If there are no outputs, or their containers differ.

    Example:
        >>> join_outputs([(torch.arange(2), 0.5), (torch.arange(1), 0.25)], list)
        (tensor([0, 1, 0]), [0.5, 0.25])
    """
    if not outputs:
        raise BatchError("`outputs` must hold at least one entry, got none.")
    joining = _Joining(
        counts=[None] * len(outputs) if num_rows is None else num_rows,
        value=lambda _path, parts: otherwise(parts),
        ragged=lambda _error, parts: otherwise(parts),
        is_per_row=_is_per_row_output,
    )
    return cast("_Batch", _join(outputs, "", joining))


def move_to_device(
    batch: _Batch, device: torch.device | str | int, *, non_blocking: bool = False
) -> _Batch:
    """Move every tensor of a batch to a device; what is no tensor passes through.

    Objects with a method ``to`` of their own are asked: ``to(device)``, with ``non_blocking=True``
    only if that is wanted and accepted. Containers with such a method are asked on a shallow
    copy, since some of them move in place.

    Args:
        batch: Any nesting.
        device: Where to.
        non_blocking: Do not wait for the copies (from pinned memory to an accelerator).

    Returns:
        A batch of the same containers. Tensors that are on the device already are the same objects.

    Raises:
        BatchError: If a container cannot be rebuilt.

    Example:
        >>> move_to_device({"x": torch.zeros(2), "name": "a"}, "meta")
        {'x': tensor(..., device='meta', size=(2,)), 'name': 'a'}
    """
    target = device if isinstance(device, torch.device) else torch.device(device)
    return cast("_Batch", _move(batch, target, non_blocking))


class _Mark(NamedTuple):
    """What may carry rows: a tensor or array, or a list with nothing of the kind in it."""

    path: str
    length: int
    lists: tuple[int, ...]  # the lengths of the lists around it, outermost first
    is_tensor: bool


def _walk(node: object, path: str) -> Iterator[tuple[str, object]]:
    children = _children(node)
    if children is None:
        yield path, node
        return
    for key, child in children:
        yield from _walk(child, _below(path, key))


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _called(path: str) -> str:
    return f"Batch leaf {path!r}" if path else "The batch"


def _children(node: object) -> list[tuple[object, object]] | None:
    """List the keys and values of a container; None for a leaf."""
    if type(node) in _PLAIN_TYPES or isinstance(node, (Tensor, PackedSequence, torch.Size)):
        return None
    if isinstance(node, Mapping):
        return list(node.items())
    if _is_namedtuple(node):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (list, tuple, UserList, deque)):
        return list(enumerate(node))
    if is_dataclass(node) and not isinstance(node, type):
        # A field that is not set by __init__ may not be there at all.
        values = ((field.name, getattr(node, field.name, _ABSENT)) for field in fields(node))
        return [(name, value) for name, value in values if value is not _ABSENT]
    return None


def _rebuild(node: object, items: list[tuple[object, object]]) -> object:
    """Make a container like ``node`` that holds ``items``, without running its constructor.

    Mappings and dataclasses keep their keys; a list may change its length. Only mappings that
    are neither dicts nor UserDicts are constructed: a copy of them might share their storage.
    """
    kind = type(node)
    if kind is dict:
        return dict(items)
    if kind is list or kind is tuple:
        return kind(value for _, value in items)
    try:
        return _rebuild_special(node, items)
    except TypeError as error:
        raise BatchError(
            f"A batch container of type {kind.__name__} cannot be made again with other values:"
            f" {error}. Give it a constructor that takes them, or use a dict, list or dataclass."
        ) from error


def _rebuild_special(node: object, items: list[tuple[object, object]]) -> object:
    if isinstance(node, Mapping) and not isinstance(node, (dict, UserDict)):
        return type(node)(dict(items))  # type: ignore[call-arg]
    if _is_namedtuple(node):
        return node._make(value for _, value in items)
    if isinstance(node, tuple):
        return type(node)(value for _, value in items)
    return _copy_with(node, items)


def _copy_with(node: object, items: list[tuple[object, object]]) -> object:
    made = copy.copy(node)
    if isinstance(made, (list, UserList, deque)):
        made.clear()
        made.extend(value for _, value in items)
        if len(made) != len(items):  # a deque drops what is beyond its `maxlen`
            raise BatchError(
                f"A batch container of type {type(node).__name__} must hold {len(items)} entries,"
                f" holds {len(made)}. Use a list."
            )
    elif isinstance(made, (dict, UserDict)):
        if getattr(node, "__dict__", None) is node:  # its attributes are its items
            object.__setattr__(made, "__dict__", made)
        for key, value in items:
            made[key] = value
    else:
        for name, value in items:
            object.__setattr__(made, str(name), value)
    return made


def _is_namedtuple(node: object) -> TypeGuard[_NamedTuple]:
    return isinstance(node, tuple) and isinstance(getattr(node, "_fields", None), tuple)


def _is_list(node: object) -> TypeGuard[Sequence[object]]:
    """Tell whether a node is a container whose entries could be one for each sample."""
    if isinstance(node, tuple):
        return not isinstance(node, (PackedSequence, torch.Size)) and not _is_namedtuple(node)
    return isinstance(node, (list, UserList, deque))


def _is_array(node: object) -> TypeGuard[_Array]:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(node, numpy.ndarray)


def _leaf_rows(node: object) -> int | None:
    """Count the rows of a tensor, an array or a packed sequence; None for anything else."""
    if isinstance(node, Tensor):
        return node.size(0) if node.dim() else None
    if isinstance(node, PackedSequence):
        return int(node.batch_sizes[0])
    if _is_array(node):
        return node.shape[0] if node.shape else None
    return None


def _marks(node: object, path: str = "", lists: tuple[int, ...] = ()) -> list[_Mark]:
    """Find everything that may carry rows."""
    length = _leaf_rows(node)
    if length is not None:
        return [_Mark(path, length, lists, is_tensor=True)]
    inside = (*lists, len(node)) if _is_list(node) else lists
    marks: list[_Mark] = []
    for key, child in _children(node) or ():
        if type(child) not in _PLAIN_TYPES:
            marks += _marks(child, _below(path, key), inside)
    if not marks and inside is not lists:
        return [_Mark(path, inside[-1], lists, is_tensor=False)]
    return marks


def _marks_inside(node: Sequence[object]) -> list[_Mark]:
    """Find what may carry rows in the entries of a list."""
    return [mark for child in node if type(child) not in _PLAIN_TYPES for mark in _marks(child)]


def _check(marks: list[_Mark], count: int, against: str) -> None:
    """Refuse a leaf that has not ``count`` rows and is not within a list with that many entries."""
    for mark in marks:
        if mark.length != count and count not in mark.lists:
            raise _disagreement(mark, against)


def _disagreement(mark: _Mark, against: str) -> BatchError:
    return BatchError(
        f"{_called(mark.path)} has {mark.length} samples but {against};"
        " all leaves must have the same first dimension."
    )


def _is_per_row(_path: str, node: object, count: int | None) -> bool:
    """Tell whether a node of a batch is a list with one entry for each of ``count`` samples."""
    if not _is_list(node) or len(node) != count:
        return False
    marks = _marks_inside(node)
    deciding = [mark for mark in marks if mark.is_tensor] or marks
    return not deciding or any(mark.length != count for mark in deciding)


def _is_per_row_output(path: str, node: object, count: int | None) -> bool:
    """Tell the same of a node of outputs, where plain lists carry rows whatever their length."""
    if _is_list(node) and not _marks_inside(node):
        return True
    return not _is_field_tuple(path, node) and _is_per_row(path, node, count)


def _is_field_tuple(path: str, node: object) -> bool:
    """Tell whether this is the outermost tuple of outputs, as in ``(predictions, labels)``.

    With several rows for each sample, its length could not be told from that of the batch.
    """
    return not path and isinstance(node, tuple)


def _map_rows(
    f: Callable[[str, object, int], object],
    node: object,
    path: str,
    count: int,
    is_per_row: Callable[[str, object, int | None], bool],
) -> object:
    """Apply ``f`` to the path, value and length of everything that carries rows."""
    length = _leaf_rows(node)
    if length is not None:
        return f(path, node, length)
    if is_per_row(path, node, count):
        return f(path, node, len(cast("Sequence[object]", node)))
    children = _children(node)
    if children is None:
        return node
    return _rebuild(
        node,
        [
            (key, _map_rows(f, child, _below(path, key), count, is_per_row))
            for key, child in children
        ],
    )


def _select(batch: _Batch, count: int, rows: slice | list[int]) -> _Batch:
    def take(path: str, node: object, _length: int) -> object:
        return _take(path, node, rows)

    return cast("_Batch", _map_rows(take, batch, "", count, _is_per_row))


def _take(path: str, node: object, rows: slice | list[int]) -> object:
    """Cut rows out of a tensor, an array, a packed sequence or a list with an entry per row."""
    if _is_array(node):
        return node[rows]
    if isinstance(node, Tensor) and _has_dense_rows(node):
        if node.layout is torch.strided and isinstance(rows, slice):
            return node[rows]
        index = _picked(range(node.size(0)), rows)
        return node.index_select(0, torch.tensor(index, dtype=torch.int64, device=node.device))
    if isinstance(node, (Tensor, PackedSequence)):
        return _assemble(path, _picked(_pieces(path, node), rows), node)
    return _rebuild(node, list(enumerate(_picked(list(cast("Sequence[object]", node)), rows))))


def _picked(items: Sequence[_Item], rows: slice | list[int]) -> list[_Item]:
    return list(items[rows]) if isinstance(rows, slice) else [items[row] for row in rows]


def _has_dense_rows(tensor: Tensor) -> bool:
    """Tell whether torch itself indexes and concatenates the rows of a tensor."""
    return tensor.layout in (torch.strided, torch.sparse_coo) and not tensor.is_nested


def _pieces(path: str, rows: Tensor | PackedSequence) -> list[Tensor]:
    """Take a nested tensor or a packed sequence apart, into one tensor for each sample."""
    if isinstance(rows, PackedSequence):
        return unpack_sequence(rows)
    if rows.is_nested:
        return list(rows.unbind())
    raise BatchError(
        f"{_called(path)} cannot be cut or joined: its layout is {rows.layout}."
        " Collate a dense or sparse COO tensor."
    )


def _assemble(path: str, pieces: list[Tensor], like: Tensor | PackedSequence) -> object:
    """Undo `_pieces`."""
    try:
        if isinstance(like, PackedSequence):
            return pack_sequence(pieces, enforce_sorted=False)
        return torch.nested.as_nested_tensor(pieces, layout=like.layout)
    except RuntimeError as error:
        raise BatchError(f"{_called(path)} cannot be put together: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joining:
    """What to know and to do where trees of several batches are joined."""

    counts: Sequence[int | None]  # by tree: its samples
    value: Callable[[str, list[object]], object]  # decides on parts that carry no rows
    ragged: Callable[[BatchError, list[object]], object]  # decides on rows that do not join
    is_per_row: Callable[[str, object, int | None], bool] = _is_per_row
    picks: Sequence[slice | list[int]] | None = None  # by tree: the rows to join, if not all


def _join(parts: Sequence[object], path: str, joining: _Joining) -> object:
    """Join one node of several trees."""
    if all(_leaf_rows(part) is not None for part in parts):
        try:
            return _concatenate(path, _pick_rows(parts, path, joining))
        except BatchError as error:
            return joining.ragged(error, list(parts))
    if _are_per_row(parts, path, joining):
        picked = cast("list[Sequence[object]]", _pick_rows(parts, path, joining))
        return _rebuild(parts[0], list(enumerate(chain.from_iterable(picked))))
    if all(_children(part) is None for part in parts) and _are_values(parts):
        return joining.value(path, list(parts))
    children = _matched_children(path, parts)
    return _rebuild(
        parts[0],
        [(key, _join(values, _below(path, key), joining)) for key, values in children.items()],
    )


def _are_values(parts: Sequence[object]) -> bool:
    """Tell whether leaves carry no rows, or only some of one type do: none of these may be lost."""
    return all(_leaf_rows(part) is None for part in parts) or len(set(map(type, parts))) == 1


def _pick_rows(parts: Sequence[object], path: str, joining: _Joining) -> Sequence[object]:
    if joining.picks is None:
        return parts
    return [_take(path, part, rows) for part, rows in zip(parts, joining.picks, strict=True)]


def _are_per_row(parts: Sequence[object], path: str, joining: _Joining) -> bool:
    """Tell whether lists hold one entry for each row; what one of them shows goes for all."""
    shown = possible = 0
    for part, count in zip(parts, joining.counts, strict=True):
        if joining.is_per_row(path, part, count):
            shown += 1
        elif _is_list(part) and len(part) == count:
            possible += 1
    return shown > 0 and shown + possible == len(parts)


def _matched_children(path: str, parts: Sequence[object]) -> dict[object, list[object]]:
    """Open containers of one type and the same keys; list the values of each key."""
    opened = [dict(_children(part) or ()) for part in parts]
    kind, keys = type(parts[0]), opened[0].keys()
    if any(type(part) is not kind for part in parts) or any(part.keys() != keys for part in opened):
        raise BatchError(
            f"{_called(path)} cannot be joined: it is built differently in each batch."
        )
    return {key: [part[key] for part in opened] for key in keys}


def _concatenate(path: str, parts: Sequence[object]) -> object:
    """Join the rows of tensors, of arrays or of packed sequences."""
    kinds = [_row_kind(part) for part in parts]
    for kind in kinds:
        if kind != kinds[0]:
            raise BatchError(f"{_called(path)} cannot be joined: {kinds[0]} meet {kind}.")
    if _is_array(parts[0]):
        joined: object = sys.modules["numpy"].concatenate(parts)
        return joined
    first, *_ = tensors = cast("Sequence[Tensor | PackedSequence]", parts)
    if isinstance(first, Tensor) and _has_dense_rows(first):
        return torch.cat(cast("list[Tensor]", tensors))
    return _assemble(path, [piece for part in tensors for piece in _pieces(path, part)], first)


class _RowKind(NamedTuple):
    """What must be the same for rows to join."""

    holder: object
    dtype: object
    shape: tuple[int, ...] | None
    device: torch.device | None

    def __str__(self) -> str:
        shape = "" if self.shape is None else f" and shape {tuple(self.shape)}"
        device = "" if self.device is None else f" on {self.device}"
        return f"{self.holder} rows of {self.dtype}{shape}{device}"


def _row_kind(part: object) -> _RowKind:
    if _is_array(part):
        # Strings of different lengths are of different dtypes, and join.
        dtype = {"U": "str", "S": "bytes"}.get(part.dtype.kind, part.dtype)
        return _RowKind("array", dtype, part.shape[1:], None)
    if isinstance(part, PackedSequence):
        return _RowKind("packed", part.data.dtype, part.data.shape[1:], part.data.device)
    tensor = cast("Tensor", part)
    if tensor.is_nested:
        return _RowKind("nested", tensor.dtype, None, tensor.device)
    return _RowKind(tensor.layout, tensor.dtype, tensor.shape[1:], tensor.device)


def _refuse(error: BatchError, _parts: list[object]) -> object:
    raise error


def _first_value(_path: str, parts: list[object]) -> object:
    return parts[0]


def _equal_value(path: str, parts: list[object]) -> object:
    first = parts[0]
    for other in parts[1:]:
        if not _is_equal(first, other):
            raise BatchError(
                f"{_called(path)} belongs to the whole batch and cannot be joined:"
                f" {reprlib.repr(first)} differs from {reprlib.repr(other)}."
            )
    return first


def _is_equal(one: object, other: object) -> bool:
    """Compare two values, of which both may be NaN; what does not answer yes or no is unequal."""
    if one is other or _is_true(one == other):
        return True
    return _is_true(one != one) and _is_true(other != other)  # noqa: PLR0124


def _is_true(answer: object) -> bool:
    """Tell whether a comparison says yes; tensors and arrays answer in kind."""
    return answer is True or (getattr(answer, "shape", None) == () and bool(answer))


def _move(node: object, device: torch.device, non_blocking: bool) -> object:
    # This runs on every batch: common kinds first, and no call for a tensor that is there.
    if type(node) is tuple or type(node) is list:
        kind = type(node)
        return kind(
            [
                child
                if type(child) is Tensor and child.device == device
                else _move(child, device, non_blocking)
                for child in node
            ]
        )
    if type(node) is dict:
        return {
            key: child
            if type(child) is Tensor and child.device == device
            else _move(child, device, non_blocking)
            for key, child in node.items()
        }
    if type(node) in _PLAIN_TYPES:
        return node
    return _move_special(node, device, non_blocking)


def _move_special(node: object, device: torch.device, non_blocking: bool) -> object:
    if isinstance(node, Tensor):
        return node if node.device == device else node.to(device, non_blocking=non_blocking)
    # Asked of the class: an instance may have an item or a field of that name.
    if callable(getattr(type(node), "to", None)):
        return _ask_to_move(cast("_Movable", node), device, non_blocking)
    children = _children(node)
    if children is None:
        return node
    return _rebuild(node, [(key, _move(child, device, non_blocking)) for key, child in children])


def _ask_to_move(node: _Movable, device: torch.device, non_blocking: bool) -> object:
    if isinstance(node, (dict, UserDict, list, UserList, deque)) or is_dataclass(node):
        node = copy.copy(node)
    if non_blocking and _takes_non_blocking(node.to):
        moved = node.to(device, non_blocking=True)
    else:
        moved = node.to(device)
    return node if moved is None else moved  # None: it moves in place and does not say so


def _takes_non_blocking(method: Callable[..., object]) -> bool:
    try:
        parameters = inspect.signature(method).parameters
    except ValueError:  # not written in Python
        return False
    return "non_blocking" in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
