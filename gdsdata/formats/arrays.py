"""Files of named arrays, which safetensors and npz have in common.

Rows of the arrays are samples, or each file is one.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gdsdata.formats.extents import Extents
from gdsdata.formats.field import are_names
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import Index, first_samples
from gdsdata.formats.sample import Sample


class Kind(NamedTuple):
    """The dtype, shape and order of an array, wherever it lies.

    Attributes:
        dtype: as stored, with its byte order.
        shape: as stored.
        fortran_order: the first of several axes varies fastest in the file.
        view_as: what the stored bits are, if numpy has no such dtype.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    fortran_order: bool = False
    view_as: torch.dtype | None = None

    @property
    def bytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row(self) -> Kind:
        """The kind of its rows, along the first axis."""
        return self._replace(shape=self.shape[1:])

    def __str__(self) -> str:
        order = " in Fortran order" if self.fortran_order else ""
        return f"{self.view_as or self.dtype.str} of shape {self.shape}{order}"


class Array(NamedTuple):
    """An array of some file, from ``begin_bytes`` on; it lies there as a whole."""

    kind: Kind
    begin_bytes: int


class ArrayFile(NamedTuple):
    """A file as it was found.

    Attributes:
        path, size_bytes, mtime_ns: of it.
        arrays: by name.
        data_begin: what the arrays' ``begin_bytes`` are counted from.
    """

    path: str
    size_bytes: int
    mtime_ns: int
    arrays: Mapping[str, Array]
    data_begin: int = 0


def checked_names(mode: str, names: str | Sequence[str] | None, what: str) -> str | tuple[str, ...] | None:
    """Return the names of the arrays that a format reads, as it keeps them.

    Raises:
        ValueError: there is no such mode, "rows" has no name, or one comes twice; ``what`` is the
            argument's name.
    """
    if mode not in ("rows", "file"):
        raise ValueError(f'mode={mode!r} is neither "rows" (a row is a sample) nor "file" (a file is a sample)')
    if mode == "rows" and not names:
        raise ValueError(f'mode="rows" needs the name of an array, or names: {what}="x", or {what}=("x", "y")')
    if names is None or isinstance(names, str):
        return names
    if not are_names(names):
        raise ValueError(f"{what}={names!r}: name each array once, or leave it out for all of a file's")
    return tuple(names)


def index_arrays(files: Iterable[ArrayFile], mode: str, names: str | tuple[str, ...] | None) -> Index | FieldIndex:
    """Index at least one file. Samples are rows of the named arrays, or files.

    Raises:
        ValueError: an array is missing, is no rows, or is unlike that of the same name in another
            file.
    """
    if mode == "file" or names is None:
        return _index_files(files, (names,) if isinstance(names, str) else names)
    return _index_rows(files, names)


# --- rows ------------------------------------------------------------------------------------------------------------


def _index_rows(files: Iterable[ArrayFile], names: str | tuple[str, ...]) -> Index | FieldIndex:
    """Return an `Index` for one name, and a `FieldIndex` for a tuple."""
    wanted = (names,) if isinstance(names, str) else names
    kinds: list[Kind] = []  # in the first file
    found: list[ArrayFile] = []
    counts, begins = [], []
    for file in files:
        arrays = [_array(file, name) for name in wanted]
        kinds = kinds or [array.kind for array in arrays]
        for name, array, kind in zip(wanted, arrays, kinds, strict=True):
            _check_rows(file.path, name, array.kind, arrays[0].kind)
            if array.kind is not kind and array.kind.row != kind.row:
                raise _unlike(name, array.kind, file.path, kind, found[0].path)
        found.append(file._replace(arrays={}))
        counts.append(arrays[0].kind.shape[0])
        begins.append([file.data_begin + array.begin_bytes for array in arrays])
    first_sample, base_bytes = first_samples(counts), np.array(begins, np.int64)
    stride_bytes = np.array([kind.row.bytes for kind in kinds], np.int64)
    if isinstance(names, str):
        sample = Sample(kinds[0].dtype, kinds[0].row.shape, view_as=kinds[0].view_as)
        return Index(*_about(found), first_sample, base_bytes[:, 0], np.repeat(stride_bytes, len(found)), sample)
    row = np.arange(first_sample[-1]) - np.repeat(first_sample[:-1], counts)
    begin_bytes = np.repeat(base_bytes, counts, axis=0) + row[:, None] * stride_bytes
    fields = [
        Field(name, kind.dtype, kind.row.shape, view_as=kind.view_as) for name, kind in zip(wanted, kinds, strict=True)
    ]
    extents = Extents.of(begin_bytes, np.broadcast_to(stride_bytes, begin_bytes.shape))
    return FieldIndex(*_about(found), first_sample, tuple(fields), extents)


def _check_rows(path: str, name: str, kind: Kind, first: Kind) -> None:
    """Check that an array has rows, as many as the ``first`` one of its file.

    They have bytes, so no number of rows is more than the file is long.

    Raises:
        ValueError: it has not.
    """
    if not kind.shape:
        raise ValueError(f'{path}: {name!r} is a single element, which has no rows: use mode="file"')
    if kind.fortran_order:
        raise ValueError(
            f"{path}: {name!r} is in Fortran order, so the elements of a row of {kind.shape} do not lie together: save "
            f"it with numpy.ascontiguousarray first"
        )
    if not kind.row.bytes:
        raise ValueError(f"{path}: rows of {name!r}, of shape {kind.shape}, have no bytes: there is nothing to read")
    if kind.shape[0] != first.shape[0]:
        raise ValueError(
            f"{path}: {name!r} has {kind.shape[0]} rows, and the array that is named first {first.shape[0]}, so they "
            f"make no samples together: read them as separate data sets"
        )


# --- files -----------------------------------------------------------------------------------------------------------


def _index_files(files: Iterable[ArrayFile], names: tuple[str, ...] | None) -> FieldIndex:
    """Index files as samples, whose fields are the arrays of these names.

    None: all arrays of the first file, which every file has.
    """
    wanted = names or ()
    kinds: list[Kind] = []  # in the first file
    shapes: list[dict[tuple[int, ...], None]] = []  # of each name, in any file
    found: list[ArrayFile] = []
    begins, lengths = [], []
    for file in files:
        if names is None and not found:
            wanted = tuple(file.arrays)
            if not wanted:
                raise ValueError(f"{file.path} has no arrays, so there is nothing to read: leave it out")
        arrays = [_array(file, name) for name in wanted]
        if not arrays or (names is None and len(file.arrays) != len(arrays)):
            raise ValueError(
                f"{file.path} has the arrays {_listed(file.arrays)}, and {(found or [file])[0].path} {_listed(wanted)}"
                f": name those that are in every file"
            )
        kinds = kinds or [array.kind for array in arrays]
        shapes = shapes or [{kind.shape: None} for kind in kinds]
        for name, array, kind, seen in zip(wanted, arrays, kinds, shapes, strict=True):
            if array.kind is not kind and array.kind != kind:
                if array.kind._replace(shape=kind.shape) != kind:
                    raise _unlike(name, array.kind, file.path, kind, found[0].path)
                seen[array.kind.shape] = None
        found.append(file._replace(arrays={}))
        begins.append([file.data_begin + array.begin_bytes for array in arrays])
        lengths.append([array.kind.bytes for array in arrays])
    fields = tuple(map(_field, wanted, kinds, shapes))
    first_sample = np.arange(len(found) + 1, dtype=np.int64)
    extents = Extents.of(np.array(begins, np.int64), np.array(lengths, np.int64))
    return FieldIndex(*_about(found), first_sample, fields, extents)


def _field(name: str, kind: Kind, shapes: Mapping[tuple[int, ...], None]) -> Field:
    """Return the field of arrays of this kind, which may differ along the first axis."""
    if len(shapes) == 1:
        return Field(name, kind.dtype, kind.shape, fortran_order=kind.fortran_order, view_as=kind.view_as)
    rows = {shape[1:] if shape else None for shape in shapes}
    if len(rows) > 1 or kind.fortran_order or not kind.row.bytes:
        raise ValueError(
            f"arrays named {name!r} have shapes such as {' and '.join(map(str, list(shapes)[:2]))}"
            f"{' in Fortran order' if kind.fortran_order else ''}: they may differ along the first axis alone, in C "
            f"order, or the values would not show their shape"
        )
    return Field(name, kind.dtype, None, row_shape=kind.row.shape, view_as=kind.view_as)


# --- either ----------------------------------------------------------------------------------------------------------


def _array(file: ArrayFile, name: str) -> Array:
    try:
        return file.arrays[name]
    except KeyError:
        raise no_such_array(file.path, name, file.arrays) from None


def no_such_array(path: str, name: str, names: Iterable[str]) -> ValueError:
    """Return the error for an array that is not among those of a file."""
    return ValueError(f"{path} has no array {name!r}, but {_listed(names)}")


def _listed(names: Iterable[str]) -> str:
    return reprlib.repr(list(names))


def _unlike(name: str, kind: Kind, path: str, first: Kind, first_path: str) -> ValueError:
    return ValueError(
        f"unlike arrays named {name!r}: {first} in {first_path}, {kind} in {path}; save them alike, or read them as "
        f"separate data sets"
    )


def _about(files: Sequence[ArrayFile]) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Return the first attributes of every index: paths, sizes, times."""
    sizes = np.array([file.size_bytes for file in files], np.int64)
    return [file.path for file in files], sizes, np.array([file.mtime_ns for file in files], np.int64)
