"""Aligned columns: one entry per token of a record, cut and joined with its tokens.

An entry is a number, an array of one shape for all tokens, or a list of any length. A column says which of the token's
two moments it belongs to, names its axes, and whether an entry may be unknown. Knows no record, no Arrow and no file.

Axes: S token positions, N entries of all lists, L captured layers, K top-k slots.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
from numpy.typing import NDArray

from routeplane.errors import DataError, ErrorKind, refused
from routeplane.record.parse import RESERVED_COLUMNS, as_array, as_integers, check_text, frozen_view
from routeplane.record.validate import WeightsMeaning, as_float32, illegal_weights

if TYPE_CHECKING:
    from routeplane.record.checksum import CanonicalHash
    from routeplane.record.spans import Sampling

__all__ = [
    "COLUMN_TYPES",
    "MASK_STATES",
    "AlignedColumn",
    "Alignment",
    "ColumnType",
    "aligned_columns",
    "blank_weights",
    "check_columns",
    "concatenate_columns",
    "hash_columns",
    "have_rules",
    "join_layers",
    "mask_columns",
    "read_column",
    "weights_column",
]

#: ``fed``: the entry belongs to the row of the token that was fed; ``sampled``: to the token that was sampled.
Alignment = Literal["fed", "sampled"]

#: Value types by numpy's name, in the order in which the format lists them.
COLUMN_TYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
)

_DTYPES = {name: np.dtype(name) for name in COLUMN_TYPES}
_MAX_RANK = 8
_MAX_ENTRY = 2**31  # values of one entry of a fixed shape
_AXIS = re.compile("[a-z][a-z0-9_]{0,31}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnType:
    """What a column declares. Raises DataError (TOKEN_COLUMN) for a declaration that is not possible.

    ``dtype``: one of COLUMN_TYPES. ``shape``: of an entry, for entries of one shape. ``ragged``: an entry is a list.
    ``aligned``: None for a column that declares nothing, as those of format 1.0: a number per token, never null.
    ``axes``: a name for each axis of an entry; ``layers`` and ``topk`` are those of the routes. ``nullable``: whether
    an entry may be null, which means unknown.

    >>> ColumnType(dtype="float32", shape=(2, 4), aligned="fed", axes=("layers", "topk")).plain
    False
    """

    dtype: str
    shape: tuple[int, ...] = ()
    ragged: bool = False
    aligned: Alignment | None = None
    axes: tuple[str, ...] = ()
    nullable: bool = False

    def __post_init__(self) -> None:
        rank = 1 if self.ragged else len(self.shape)
        entry = 1
        for size in self.shape:
            entry *= size if isinstance(size, int) and size > 0 else _MAX_ENTRY
        checks = {
            f"a dtype of {list(COLUMN_TYPES)}": self.dtype in COLUMN_TYPES,
            "a shape of positive sizes, or a list, not both": entry < _MAX_ENTRY and not (self.ragged and self.shape),
            f"at most {_MAX_RANK} axes": rank <= _MAX_RANK,
            "aligned as fed or sampled": self.aligned is None or self.aligned in get_args(Alignment),
            f"one name for each of {rank} axes, each once": len(set(self.axes)) == len(self.axes) == rank
            and all(isinstance(name, str) and _AXIS.fullmatch(name) for name in self.axes),
            "aligned declared where entries are null, lists or arrays": self.aligned is not None
            or not (rank or self.nullable),
            "numbers for entries that are arrays or lists": self.dtype != "bool" or rank == 0,
            "layers and topk as axes of one shape": not (self.ragged and {"layers", "topk"} & set(self.axes)),
        }
        for expected, holds in checks.items():
            if not holds:
                raise DataError(f"expected a column type with {expected}, got {self}", kind=ErrorKind.TOKEN_COLUMN)

    @property
    def plain(self) -> bool:
        """Whether format 1.0 can carry the column: a number per token, nothing declared."""
        return self.aligned is None

    def to_document(self) -> dict[str, Any]:
        """The declaration as a JSON object."""
        return {
            "aligned": self.aligned,
            "axes": list(self.axes),
            "dtype": self.dtype,
            "null": "unknown" if self.nullable else None,
            "shape": None if self.ragged else list(self.shape),
        }

    @classmethod
    def from_document(cls, document: object) -> ColumnType:
        """Parse what ``to_document`` wrote. Raises DataError (TOKEN_COLUMN) for anything else."""
        keys = {"aligned", "axes", "dtype", "null", "shape"}
        if not isinstance(document, dict) or set(document) != keys:
            raise DataError(
                f"expected a column's declaration with {sorted(keys)}, got {document!r}", kind=ErrorKind.TOKEN_COLUMN
            )
        axes, shape = document["axes"], document["shape"]
        sizes_fit = isinstance(shape, list) and all(type(size) is int for size in shape)
        axes_fit = isinstance(axes, list) and all(isinstance(axis, str) for axis in axes)
        if not axes_fit or not (shape is None or sizes_fit) or document["null"] not in (None, "unknown"):
            raise DataError(
                f"expected axes and shape as lists and null as unknown, got {document!r}", kind=ErrorKind.TOKEN_COLUMN
            )
        if document["aligned"] not in get_args(Alignment) or not isinstance(document["dtype"], str):
            raise DataError(f"expected aligned and dtype as names, got {document!r}", kind=ErrorKind.TOKEN_COLUMN)
        return cls(
            dtype=document["dtype"],
            shape=tuple(shape or ()),
            ragged=shape is None,
            aligned=document["aligned"],
            axes=tuple(axes),
            nullable=document["null"] == "unknown",
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AlignedColumn:
    """A column of S entries; made by ``AlignedColumn.of`` and ``AlignedColumn.of_lists``.

    ``values``: ``[S, *shape]``, or ``[N]`` for lists. ``offsets``: int64 ``[S + 1]`` from 0 to N, for lists alone.
    ``valid``: bool ``[S]``, where the column is nullable. Arrays are read-only; entries that are null hold zeros, and
    lists that are null are empty, so that equal columns have equal arrays.
    """

    type: ColumnType
    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None
    valid: NDArray[np.bool_] | None = None

    @classmethod
    def of(
        cls,
        values: Any,
        *,
        aligned: Alignment,
        axes: Sequence[str] = (),
        valid: Any = None,
        name: str = "a column",
    ) -> AlignedColumn:
        """Make a column of numbers, or of entries of one shape.

        Args:
            values: Array ``[S, *shape]`` of numbers, or of bools for ``[S]``; kept as a read-only view where it fits.
            aligned: ``fed`` or ``sampled``.
            axes: A name for each axis behind the first.
            valid: Bool ``[S]``; False marks an entry as unknown. None: no entry can be.
            name: What errors call the column.

        Returns:
            The column. Raises DataError (TOKEN_COLUMN).

        >>> AlignedColumn.of([[0.5, 0.5], [0.9, 0.1]], aligned="fed", axes=("topk",)).type.shape
        (2,)
        """
        array = _numbers(values, name)
        kind = ColumnType(
            dtype=array.dtype.name,
            shape=array.shape[1:],
            aligned=aligned,
            axes=tuple(axes),
            nullable=valid is not None,
        )
        return _settled(cls(type=kind, values=array, valid=valid), name)

    @classmethod
    def of_lists(
        cls,
        lists: Iterable[Any],
        *,
        dtype: str,
        aligned: Alignment,
        axis: str = "entries",
        nullable: bool = False,
    ) -> AlignedColumn:
        """Make a column whose entries are lists.

        Args:
            lists: One sequence of numbers per token; None for an unknown one, where ``nullable``.
            dtype: Of the values, one of COLUMN_TYPES.
            aligned: ``fed`` or ``sampled``.
            axis: A name for the axis along a list.
            nullable: Whether an entry may be unknown.

        Returns:
            The column, in memory of its own. Raises DataError (TOKEN_COLUMN).

        >>> AlignedColumn.of_lists([[], [7, 9]], dtype="int32", aligned="sampled").offsets.tolist()
        [0, 0, 2]
        """
        given = list(lists)
        arrays = [np.asarray([] if one is None else one) for one in given]
        lengths = [len(array) for array in arrays]
        target = np.dtype(dtype)
        joined = [_fitting(array, target) for array in arrays if len(array)]
        column = cls(
            type=ColumnType(dtype=dtype, ragged=True, aligned=aligned, axes=(axis,), nullable=nullable),
            values=np.concatenate([np.empty(0, target), *joined]),
            offsets=np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            valid=np.asarray([one is not None for one in given], dtype=np.bool_) if nullable else None,
        )
        if not nullable and any(one is None for one in given):
            raise DataError("expected nullable=True for lists that are None", kind=ErrorKind.TOKEN_COLUMN)
        return _settled(column, "a column")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return self.values.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in (self.values, self.offsets, self.valid) if array is not None)

    def __reduce__(self) -> tuple[object, ...]:
        # unpickled arrays may be written to: they are made read-only again
        return _rebuild, (self.type, self.values, self.offsets, self.valid)

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        array = self.array()
        return np.array(array, dtype=dtype) if copy else np.asarray(array, dtype=dtype)

    def array(self) -> NDArray[Any]:
        """The entries as one read-only array ``[S, *shape]``. Raises DataError for lists and nulls."""
        if self.offsets is not None or (self.valid is not None and not self.valid.all()):
            raise DataError(
                f"expected entries of one shape and none null, got {self.type}", kind=ErrorKind.TOKEN_COLUMN
            )
        return self.values

    def entry(self, token: int) -> Any:
        """Entry ``token``: None where it is unknown, a number, or an array."""
        if self.valid is not None and not self.valid[token]:
            return None
        if self.offsets is None:
            return self.values[token]
        return self.values[self.offsets[token] : self.offsets[token + 1]]

    def tolist(self) -> list[Any]:
        """All entries as plain Python values; None where one is unknown."""
        found = [self.entry(token) for token in range(len(self))]
        return [None if one is None else one.tolist() for one in found]

    def __iter__(self) -> Iterator[Any]:
        return (self.entry(token) for token in range(len(self)))

    @overload
    def __getitem__(self, where: slice) -> AlignedColumn: ...
    @overload
    def __getitem__(self, where: int) -> Any: ...
    def __getitem__(self, where: slice | int) -> Any:
        """The entries of neighbouring tokens as a column that shares memory, or the entry of one."""
        if not isinstance(where, slice):
            return self.entry(where)
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise DataError(f"expected neighbouring tokens, got {where}", kind=ErrorKind.TOKEN_COLUMN)
        stop = max(start, stop)
        valid = None if self.valid is None else self.valid[start:stop]
        if self.offsets is None:
            return replace(self, values=self.values[start:stop], valid=valid)
        first, last = self.offsets[start], self.offsets[stop]
        offsets = frozen_view(self.offsets[start : stop + 1] - first)
        return replace(self, values=self.values[first:last], offsets=offsets, valid=valid)

    def take(self, tokens: NDArray[np.int64]) -> AlignedColumn:
        """The entries of any tokens, in that order, in memory of their own."""
        valid = None if self.valid is None else frozen_view(self.valid[tokens])
        if self.offsets is None:
            return replace(self, values=frozen_view(self.values[tokens]), valid=valid)
        lengths = np.diff(self.offsets)[tokens]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
        values = self.values[np.repeat(self.offsets[tokens], lengths) + within]
        return replace(self, values=frozen_view(values), offsets=frozen_view(offsets), valid=valid)

    def pick_layers(self, slots: Sequence[int]) -> AlignedColumn:
        """The column for some of the captured layers: itself, where it has no axis of that name."""
        if "layers" not in self.type.axes:
            return self
        axis = self.type.axes.index("layers")
        values = np.ascontiguousarray(np.take(self.values, list(slots), axis=axis + 1))
        shape = (*self.type.shape[:axis], len(slots), *self.type.shape[axis + 1 :])
        return replace(self, type=replace(self.type, shape=shape), values=frozen_view(values))

    def place_layers(self, slots: Sequence[int], count: int, *, name: str) -> AlignedColumn:
        """The column over ``count`` layers, of which it has those at ``slots``; NaN in the others.

        Raises DataError for values that know no NaN.
        """
        if "layers" not in self.type.axes or (len(slots) == count and list(slots) == list(range(count))):
            return self
        bits = self.dtype == np.uint16 and name == "route_weights"  # bfloat16, as bits
        if self.dtype.kind != "f" and not bits:
            raise DataError(
                f"expected all layers of {name!r}, got some: {self.dtype} has no value for those that are absent",
                kind=ErrorKind.TOKEN_COLUMN,
            )
        axis = self.type.axes.index("layers")
        shape = (*self.type.shape[:axis], count, *self.type.shape[axis + 1 :])
        values = np.full((len(self), *shape), BFLOAT16_NAN if bits else np.nan, dtype=self.dtype)
        values[(slice(None),) * (axis + 1) + (list(slots),)] = self.values
        return replace(self, type=replace(self.type, shape=shape), values=frozen_view(values))

    def copy(self) -> AlignedColumn:
        """The same entries in memory of their own."""
        offsets = None if self.offsets is None else self.offsets.copy()
        return _rebuild(self.type, self.values.copy(), offsets, None if self.valid is None else self.valid.copy())

    def equals(self, other: AlignedColumn) -> bool:
        """Whether type and entries are equal; NaN equals NaN."""
        return (
            self.type == other.type
            and _same(self.values, other.values)
            and _same(self.offsets, other.offsets)
            and _same(self.valid, other.valid)
        )


#: NaN in the upper half of a float32, which is how a bfloat16 is stored as uint16.
BFLOAT16_NAN = 0x7FC0


def _same(one: NDArray[Any] | None, other: NDArray[Any] | None) -> bool:
    if one is None or other is None:
        return one is other
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


def _numbers(values: Any, name: str) -> NDArray[Any]:
    array = as_array(values, what=name)
    if array.dtype.kind not in "iufb" or array.dtype.itemsize > 8 or array.ndim == 0:
        raise DataError(
            f"expected {name} of an integer, float or bool type, got {array.dtype} {list(array.shape)}",
            kind=ErrorKind.TOKEN_COLUMN,
        )
    return frozen_view(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")))


def _fitting(array: NDArray[Any], target: np.dtype[Any]) -> NDArray[Any]:
    """The array as ``target``; integers must fit, floats may be rounded."""
    found = array.astype(target)
    if array.dtype.kind not in ("f" if target.kind == "f" else "iu") and not (
        target.kind == "f" and array.dtype.kind in "iu"
    ):
        raise DataError(f"expected lists of {target}, got {array.dtype}", kind=ErrorKind.TOKEN_COLUMN)
    if target.kind in "iu" and not np.array_equal(found.astype(object), array.astype(object)):
        raise DataError(f"expected lists of values that {target} holds, got others", kind=ErrorKind.TOKEN_COLUMN)
    return found


def _settled(column: AlignedColumn, name: str) -> AlignedColumn:
    """The column with arrays that are checked, read-only, and zero where an entry is null."""
    size, values, offsets = len(column), column.values, column.offsets
    valid = None if column.valid is None else np.asarray(column.valid)
    if valid is not None and (valid.dtype != np.bool_ or valid.shape != (size,)):
        raise DataError(f"expected valid of {name} as bool [{size}], got {valid.dtype}", kind=ErrorKind.TOKEN_COLUMN)
    if offsets is not None and (
        offsets.dtype != np.int64 or offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any()
    ):
        raise DataError(f"expected offsets of {name} that ascend from 0 to its values", kind=ErrorKind.TOKEN_COLUMN)
    if valid is not None and not valid.all():
        if offsets is not None:
            keep = np.repeat(valid, np.diff(offsets))
            lengths = np.where(valid, np.diff(offsets), 0)
            values, offsets = values[keep], np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        else:
            values = values.copy()
            values[~valid] = 0
    return replace(
        column,
        values=frozen_view(np.ascontiguousarray(values)),
        offsets=None if offsets is None else frozen_view(offsets),
        valid=None if valid is None else frozen_view(valid),
    )


def read_column(
    kind: ColumnType,
    values: NDArray[Any],
    *,
    offsets: NDArray[np.int64] | None,
    valid: NDArray[np.bool_] | None,
    name: str,
) -> AlignedColumn:
    """A column as a stream stores it; its arrays are kept as read-only views where no entry is null.

    ``values``: ``[S, *shape]`` or ``[N]``, C-contiguous, of ``kind``'s type. Raises DataError (TOKEN_COLUMN).
    """
    if offsets is None and valid is None:
        return AlignedColumn(type=kind, values=frozen_view(values))
    return _settled(AlignedColumn(type=kind, values=values, offsets=offsets, valid=valid), name)


def _check_built(column: AlignedColumn, name: str) -> None:
    """Raise DataError for a column whose arrays are not what its type says: built by hand, without ``of``."""
    kind, values, offsets, valid = column.type, column.values, column.offsets, column.valid
    plain = kind.aligned is None and offsets is None and valid is None and values.ndim == 1
    if plain and values.dtype == _DTYPES[kind.dtype] and not values.flags.writeable:
        return  # nearly always
    arrays = [array for array in (values, offsets, valid) if array is not None]
    agrees = {
        f"values of {kind.dtype}": values.dtype.name == kind.dtype,
        "values of the type's shape": kind.ragged or values.shape[1:] == kind.shape,
        "offsets for lists alone": kind.ragged == (offsets is not None),
        "offsets from 0 to the last value": offsets is None
        or (offsets.dtype == np.int64 and len(offsets) > 0 and (offsets[0], offsets[-1]) == (0, len(values))),
        "validity where the type is nullable": kind.nullable == (valid is not None),
        "a bool for each entry": valid is None or (valid.dtype == np.bool_ and valid.shape == (len(column),)),
        "read-only arrays": not any(array.flags.writeable for array in arrays),
    }
    broken = [expected for expected, holds in agrees.items() if not holds]
    if broken:
        raise DataError(
            f"expected token column {name!r} with {'; '.join(broken)}, got {values.dtype} {list(values.shape)} "
            "(AlignedColumn.of and of_lists make columns)",
            kind=ErrorKind.TOKEN_COLUMN,
        )


def aligned_columns(columns: Mapping[str, Any] | None, length: int) -> Mapping[str, AlignedColumn]:
    """Columns by ascending name, each of ``length`` entries; arrays ``[length]`` become columns that declare nothing.

    Raises DataError (TOKEN_COLUMN) for a name of the format's own or an empty one, another length, or a type that the
    format does not have.
    """
    if not columns:
        return MappingProxyType({})
    checked: dict[str, AlignedColumn] = {}
    given = dict(columns)
    for name in given:
        if check_text(name, "a token column's name") in RESERVED_COLUMNS:
            raise DataError(
                f"expected a token column name outside the format's own, got {name!r}", kind=ErrorKind.TOKEN_COLUMN
            )
    for name in sorted(given):
        column = given[name]
        if not isinstance(column, AlignedColumn):
            array = _numbers(column, f"token column {name!r}")
            if array.ndim != 1:
                raise DataError(
                    f"expected token column {name!r} of the record's {length} tokens, got shape {list(array.shape)} "
                    "(AlignedColumn.of names further axes)",
                    kind=ErrorKind.TOKEN_COLUMN,
                )
            column = AlignedColumn(type=ColumnType(dtype=array.dtype.name), values=array)
        _check_built(column, name)
        if len(column) != length:
            raise DataError(
                f"expected token column {name!r} of the record's {length} tokens, got {len(column)}",
                kind=ErrorKind.TOKEN_COLUMN,
            )
        checked[name] = column
    return MappingProxyType(checked)


def concatenate_columns(parts: Sequence[AlignedColumn], *, name: str, where: str) -> AlignedColumn:
    """Entries one after the other, in memory of their own. Raises DataError where the types differ."""
    kind = parts[0].type
    for part in parts:
        if part.type != kind:
            raise DataError(
                f"expected token column {name!r} of one type in all parts, {kind}, got {part.type} @ {where}",
                kind=ErrorKind.TOKEN_COLUMN,
            )
    values = np.concatenate([part.values for part in parts])
    valid = None if kind.nullable is False else np.concatenate([part.valid for part in parts if part.valid is not None])
    if not kind.ragged:
        return replace(parts[0], values=frozen_view(values), valid=None if valid is None else frozen_view(valid))
    lengths = np.concatenate([np.diff(part.offsets) for part in parts if part.offsets is not None])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return replace(
        parts[0],
        values=frozen_view(values),
        offsets=frozen_view(offsets),
        valid=None if valid is None else frozen_view(valid),
    )


def join_layers(parts: Sequence[AlignedColumn], *, name: str) -> AlignedColumn:
    """Columns of one layer each, as one with all of them, in the order given. Raises DataError where they differ."""
    first = parts[0]
    for part in parts:
        if replace(part.type, shape=first.type.shape) != first.type or not _same(part.valid, first.valid):
            raise DataError(
                f"expected {name} of one type in all layers, {first.type}, got {part.type}", kind=ErrorKind.TOKEN_COLUMN
            )
    axis = first.type.axes.index("layers")
    values = np.concatenate([part.values for part in parts], axis=axis + 1)
    return replace(first, type=replace(first.type, shape=values.shape[1:]), values=frozen_view(values))


def hash_columns(out: CanonicalHash, columns: Mapping[str, AlignedColumn]) -> None:
    """All columns in canonical form, in the order of their names."""
    for name, column in columns.items():
        if column.type.plain:
            out.token_column(name, column.values, dtype=column.type.dtype)
            continue
        kind = column.type
        # no column of 1.0 begins so: its first item is named ``type``
        out.begin_list("column", 5)
        out.text("type", kind.dtype)
        out.text("aligned", kind.aligned)
        out.begin_list("axes", len(kind.axes))
        for axis in kind.axes:
            out.text("axis", axis)
        out.array("shape", None if kind.ragged else np.asarray(kind.shape, dtype=np.int64))
        out.array("valid", column.valid)
        out.array("offsets", column.offsets)
        out.array(name, column.values)


def _rebuild(
    kind: ColumnType, values: NDArray[Any], offsets: NDArray[np.int64] | None, valid: NDArray[np.bool_] | None
) -> AlignedColumn:
    return read_column(kind, values, offsets=offsets, valid=valid, name="a pickled column")


# ----------------------------------------------------------------------------------------------------------------------
# Columns whose names have a meaning
# ----------------------------------------------------------------------------------------------------------------------

#: Names of columns with rules of their own.
_RULED = frozenset({"loss_mask", "route_weights", "sampling_mask", "sampling_mask_state"})


def have_rules(columns: Mapping[str, AlignedColumn]) -> bool:
    """Whether ``check_columns`` has anything to check: a name with a rule, or axes that the record may have too."""
    return any(column.type.axes for column in columns.values()) or not _RULED.isdisjoint(columns)


#: The codes of ``sampling_mask_state``: what the list of a token says.
MASK_STATES = ("unknown", "listed", "full", "capped")


def check_columns(
    columns: Mapping[str, AlignedColumn],
    *,
    token_ids: NDArray[np.int32],
    sampled: Callable[[], NDArray[np.bool_]],
    missing: Callable[[], NDArray[np.bool_]],
    row_shape: tuple[int, int],
    attributes: Mapping[str, str],
    sample: str,
) -> None:
    """Raise DataError (TOKEN_COLUMN) where columns contradict the record's geometry, or a rule of their name.

    ``sampled``: tells which tokens of the columns a policy sampled, bool ``[S]``. ``missing``: tells which rows of the
    last tokens are MISSING, bool ``[R, L]``; columns may begin before them. Both are asked where a rule needs them: a
    pass over all rows costs more than all else that is checked here.
    """
    sizes = dict(zip(("layers", "topk"), row_shape, strict=True))
    for name, column in columns.items():
        for axis, size in zip(column.type.axes, column.type.shape, strict=False):
            if sizes.get(axis, size) != size:
                raise _unfit(name, f"{sizes[axis]} entries along {axis}", f"{size}", sample)
    if "route_weights" in columns:
        _check_weights(columns["route_weights"], missing(), attributes, sample)
    if "sampling_mask" in columns or "sampling_mask_state" in columns:
        _check_mask(columns, token_ids, sampled(), sample)
    mask = columns.get("loss_mask")
    if mask is not None and (mask.type.shape or mask.type.ragged):
        raise _unfit("loss_mask", "a number per token", str(mask.type), sample)


def _unfit(name: str, expected: str, got: str, sample: str) -> DataError:
    return DataError(f"expected {name} with {expected}, got {got} @ sample {sample}", kind=ErrorKind.TOKEN_COLUMN)


def _check_weights(
    weights: AlignedColumn, missing_SL: NDArray[np.bool_], attributes: Mapping[str, str], sample: str
) -> None:
    kind = weights.type
    if kind.axes != ("layers", "topk") or kind.dtype not in ("float32", "uint16") or kind.nullable:
        raise _unfit(
            "route_weights", "axes layers, topk as float32 or bfloat16 bits (uint16), none null", str(kind), sample
        )
    if kind.aligned != "fed" or not attributes.get("weights_meaning"):
        raise _unfit(
            "route_weights",
            "aligned fed and attributes['weights_meaning']",
            f"{kind.aligned}, {dict(attributes)}",
            sample,
        )
    meaning = WeightsMeaning.from_text(attributes["weights_meaning"])
    values = weights.values[len(weights) - len(missing_SL) :]
    wrong_SL = illegal_weights(values, missing_SL, meaning=meaning)
    if wrong_SL.any():
        token, slot = np.argwhere(wrong_SL)[0]
        raise _unfit(
            "route_weights",
            f"NaN exactly where the row is MISSING, else weights as {meaning.to_text()} says",
            f"{as_float32(values[token, slot]).tolist()} at own row {token}, layer slot {slot}",
            sample,
        )


def _check_mask(
    columns: Mapping[str, AlignedColumn], token_ids: NDArray[np.int32], sampled_S: NDArray[np.bool_], sample: str
) -> None:
    mask, state = columns.get("sampling_mask"), columns.get("sampling_mask_state")
    if mask is None or state is None:
        raise _unfit("sampling_mask", "sampling_mask_state beside it", f"{sorted(columns)}", sample)
    if mask.offsets is None or mask.type.dtype != "int32" or mask.type.nullable or mask.type.aligned != "sampled":
        raise _unfit("sampling_mask", "lists of int32, aligned sampled, none null", str(mask.type), sample)
    if state.type.dtype != "uint8" or state.type.shape or state.type.ragged or state.type.nullable:
        raise _unfit("sampling_mask_state", "uint8, none null", str(state.type), sample)
    codes_S, lengths_S = state.values, np.diff(mask.offsets)
    listed_S = (codes_S == MASK_STATES.index("listed")) | (codes_S == MASK_STATES.index("capped"))
    if (codes_S >= len(MASK_STATES)).any() or ((lengths_S > 0) != listed_S).any() or (listed_S & ~sampled_S).any():
        raise _unfit(
            "sampling_mask",
            f"codes of {MASK_STATES}, lists exactly where listed or capped, and only at sampled tokens",
            f"codes {np.unique(codes_S).tolist()} and {int((lengths_S > 0).sum())} lists",
            sample,
        )
    owner_N = np.repeat(np.arange(len(mask)), lengths_S)
    same_list = owner_N[1:] == owner_N[:-1]
    ascending = not (same_list & (np.diff(mask.values.astype(np.int64)) <= 0)).any()
    found_S = np.zeros(len(mask), dtype=np.bool_)
    found_S[owner_N[mask.values == token_ids[owner_N]]] = True
    if not ascending or (mask.values < 0).any() or (listed_S & ~found_S).any():
        raise _unfit("sampling_mask", "ids that ascend within a list, and the sampled id inside", "others", sample)


def weights_column(weights_RLK: NDArray[Any], *, tokens: int, first_row: int = 0) -> AlignedColumn:
    """Make the column ``route_weights`` of a call, NaN at tokens that brought no row.

    Args:
        weights_RLK: Weights in the slots of the call's rows ``[R, L, K]``: float32, or uint16 bits of bfloat16.
        tokens: How many tokens the call has.
        first_row: The token of the first row.

    Returns:
        The column of ``tokens`` entries, in memory of its own.

    >>> weights_column(np.asarray([[[0.75, 0.25]]], dtype=np.float32), tokens=2).tolist()
    [[[0.75, 0.25]], [[nan, nan]]]
    """
    nan = BFLOAT16_NAN if weights_RLK.dtype == np.uint16 else np.nan
    values_SLK = np.full((tokens, *weights_RLK.shape[1:]), nan, dtype=weights_RLK.dtype)
    values_SLK[first_row : first_row + len(weights_RLK)] = weights_RLK
    return AlignedColumn.of(values_SLK, aligned="fed", axes=("layers", "topk"), name="route_weights")


def mask_columns(
    kept: Sequence[Any],
    generation_ids: NDArray[np.int32],
    *,
    prompt: int,
    sampling: Sampling | None,
    call: str,
    vocab_size: int | None = None,
    capped: Sequence[bool] | None = None,
) -> dict[str, AlignedColumn]:
    """Make the columns ``sampling_mask`` and ``sampling_mask_state`` of a call from what its engine says.

    Args:
        kept: For each sampled token the ids that its sampler could have drawn, in any order; None where the engine does
            not say.
        generation_ids: The sampled tokens, int32 ``[G]``.
        prompt: How many tokens stand before them; they have no entry.
        sampling: The parameters, of which a temperature above 0 and processed log-probabilities are required: a mask
            means nothing without its temperature, and raw log-probabilities are not those of the kept ids.
        call: Named in errors.
        vocab_size: Ids of the model's logits. A list of all of them is stored as ``full``, without ids.
        capped: Whether the engine cut a list short, for each token; None: no list was.

    Returns:
        The columns of ``prompt + G`` entries, in memory of their own. Raises UsageError for masks under these
        parameters, DataError (TOKEN_COLUMN) for lists that are not those of the tokens.

    >>> from routeplane import Sampling
    >>> how = Sampling(temperature=0.8, top_p=0.9, logprobs_mode="processed")
    >>> made = mask_columns([[9, 7], None], np.asarray([7, 3]), prompt=1, sampling=how, call="c")
    >>> made["sampling_mask"].tolist(), made["sampling_mask_state"].tolist()
    ([[], [7, 9], []], [0, 1, 0])
    """
    _check_mask_sampling(sampling, call)
    count, cut_G = len(generation_ids), [False] * len(kept) if capped is None else list(capped)
    if not len(kept) == len(cut_G) == count:
        raise _unfit_list(f"one list for each of {count} sampled tokens", f"{len(kept)}", call)
    lists: list[NDArray[np.int32]] = [np.empty(0, np.int32)] * prompt
    codes_S = np.zeros(prompt + count, dtype=np.uint8)
    for at, (ids, cut, sampled) in enumerate(zip(kept, cut_G, generation_ids.tolist(), strict=True)):
        kept_N = np.empty(0, np.int32)
        if ids is not None:
            kept_N = _kept_ids(ids, sampled, vocab_size, f"{call}, generated token {at}")
            full = len(kept_N) == vocab_size
            codes_S[prompt + at] = MASK_STATES.index("full" if full else "capped" if cut else "listed")
            kept_N = kept_N[:0] if full else kept_N
        lists.append(kept_N)
    return {
        "sampling_mask": AlignedColumn.of_lists(lists, dtype="int32", aligned="sampled", axis="kept"),
        "sampling_mask_state": AlignedColumn.of(codes_S, aligned="sampled"),
    }


def _check_mask_sampling(sampling: Sampling | None, call: str) -> None:
    if sampling is None or not sampling.temperature or sampling.temperature < 0:
        got = "none" if sampling is None else repr(sampling.temperature)
        raise refused("a temperature above 0 in the sampling parameters beside masks", f"{got} @ call {call}")
    if sampling.logprobs_mode != "processed":
        raise refused("logprobs_mode 'processed' beside sampling masks", f"{sampling.logprobs_mode!r} @ call {call}")


def _kept_ids(ids: Any, sampled: int, vocab_size: int | None, where: str) -> NDArray[np.int32]:
    """The ids ascending, each once, in the vocabulary, the sampled one among them."""
    kept_N = np.sort(as_integers(ids, np.int32, what=f"kept ids of call {where}", ndim=1))
    if len(kept_N) == 0 or kept_N[0] < 0 or (vocab_size is not None and kept_N[-1] >= vocab_size):
        bound = "" if vocab_size is None else f" below {vocab_size}"
        raise _unfit_list(f"ids from 0 on{bound}", f"{kept_N[:1].tolist()} to {kept_N[-1:].tolist()}", where)
    if (kept_N[1:] == kept_N[:-1]).any():
        raise _unfit_list("each id once", f"{kept_N[1:][kept_N[1:] == kept_N[:-1]].tolist()[:8]} again", where)
    if kept_N[min(int(np.searchsorted(kept_N, sampled)), len(kept_N) - 1)] != sampled:
        raise _unfit_list(f"the sampled id {sampled} inside", f"{kept_N.tolist()[:8]} of {len(kept_N)}", where)
    return kept_N


def _unfit_list(expected: str, got: str, where: str) -> DataError:
    return DataError(f"expected kept ids with {expected}, got {got} @ call {where}", kind=ErrorKind.TOKEN_COLUMN)


def blank_weights(columns: Mapping[str, AlignedColumn], *, own: int) -> Mapping[str, AlignedColumn]:
    """The columns of a record whose last ``own`` rows were discarded: their routing weights are NaN."""
    weights = columns.get("route_weights")
    if weights is None or own == 0:
        return columns
    values = weights.values.copy()
    values[len(weights) - own :] = BFLOAT16_NAN if weights.dtype == np.uint16 else np.nan
    return MappingProxyType({**columns, "route_weights": replace(weights, values=frozen_view(values))})
