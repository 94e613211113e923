"""`safe_open`: a safetensors file whose tensors are read when they are asked for."""

from __future__ import annotations

import operator
import os
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.checkpoint.explanations import ZIP_MAGIC, checked_path, foreign_file
from gdsdata.checkpoint.gc_pause import collector_paused
from gdsdata.checkpoint.hooks_report import COUNTS
from gdsdata.checkpoint.open_file import HEAD_BYTES, OpenFile
from gdsdata.checkpoint.open_object import open_path
from gdsdata.checkpoint.safetensors.errors import DamagedFile, SafetensorError
from gdsdata.checkpoint.safetensors.read_ahead import ReadAhead
from gdsdata.checkpoint.safetensors.stock import stock
from gdsdata.checkpoint.safetensors_file import code_of, read_file_header
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.errors import CorruptData
from gdsdata.formats.parsers.safetensors_header import PACKED, recognises
from gdsdata.io import engine
from gdsdata.io.options import EngineOptions

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

OPENED = "safetensors.safe_open"  # as `torch_hooks` report it
_FRAMEWORKS = ("pt", "torch", "pytorch")
_BACKENDS = ("mmap", "pread")

Device = torch.device | str | int


class safe_open:
    """An open safetensors file, as `safetensors.safe_open`.

        with safe_open("model.safetensors", framework="pt", device="cuda") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)

    The engine reads straight into the tensors, on the device. A loop over the tensors is noticed,
    and what it asks for next is read ahead: see `ReadAhead`. Tensors have memory of their own. When
    they have been read, the file may change.

    Any thread may call it. Slices may be used after ``with`` has ended.

    Args:
        filename: of the file, or the URL of an object.
        framework: "pt". `safetensors` itself opens the file for any other framework, and for
            devices other than CPU and CUDA.
        device: of the tensors. A number is that of a GPU.
        backend: "mmap" or "pread", which make no difference.

    Raises:
        FileNotFoundError: there is no such file.
        SafetensorError: the header is damaged (the error is a `CorruptData` too), or
            ``framework``, ``device`` or ``backend`` is unknown.
        IoError, PermissionError: the file cannot be opened.
    """

    def __new__(
        cls,
        filename: str | os.PathLike[str],
        framework: str,
        device: Device | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> Self:
        if framework in _FRAMEWORKS and backend in _BACKENDS and _is_served(device):
            return super().__new__(cls)
        asked = f"framework={framework!r}, device={device!r}, backend={backend!r}"
        its = stock(f"safe_open({asked})")
        COUNTS.leave(asked, filename)
        return its.safe_open(filename, framework=framework, device=device, backend=backend)

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: Device | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        path = checked_path(filename, "load")
        try:
            file = open_path(path)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"No such file or directory: {path}") from error
        try:
            header = read_file_header(file)
        except CorruptData as error:
            message = _what_else(file) or str(error)
            raise DamagedFile(message, error.path, error.offset, error.length) from error
        self._tensors, self._metadata = header.tensors, header.metadata
        self._device = "cpu" if device is None else device
        self._options = EngineOptions()
        self._reader: ReadAhead | None = ReadAhead(self._tensors, self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        self._opened()
        return sorted(self._tensors)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors in the order of their places in the file."""
        self._opened()
        return sorted(self._tensors, key=lambda name: self._tensors[name].record.offset)

    def metadata(self) -> dict[str, str] | None:
        """Return the header's metadata; None if it has none."""
        self._opened()
        return None if self._metadata is None else dict(self._metadata)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor.

        Raises:
            SafetensorError: the file has no such tensor, or was closed.
            IoError, CorruptData: the file cannot be read, or was changed since it was opened.

        Stream semantics: the bytes are in place when this returns, for every stream.
        """
        reader = self._opened()
        self._stored(name)
        return reader.get(name, resolved(self._device))

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Read all tensors in few large requests. They come in the order of the file.

        Raises:
            SafetensorError: the file was closed.
            IoError, CorruptData: the file cannot be read, or was changed since it was opened.

        Stream semantics: the bytes are in place when this returns, for every stream.
        """
        with collector_paused():
            wanted = {(name,): self._tensors[name] for name in self.offset_keys()}
            reader, device = TensorReader(self._options, verify=False), resolved(self._device)
            reader.expect(sum(stored.size_bytes for stored in wanted.values()), device)
            made = reader.tensors(wanted, device)
            reader.run()
            return {path[0]: made[path] for path in wanted}

    def get_slice(self, name: str) -> SafeSlice:
        """Return a tensor that is read when it is indexed.

        Raises:
            SafetensorError: the file has no such tensor, or was closed.
        """
        reader = self._opened()
        return SafeSlice(name, self._stored(name), reader, self._device, self._options)

    def _opened(self) -> ReadAhead:
        if self._reader is None:
            raise SafetensorError("File is closed")
        return self._reader

    def _stored(self, name: str) -> Stored:
        if name not in self._tensors:
            raise SafetensorError(f"File does not contain tensor {name}")
        return self._tensors[name]


class SafeSlice:
    """A tensor of a file, read when it is indexed. `safe_open.get_slice` returns one."""

    def __init__(self, name: str, stored: Stored, reader: ReadAhead, device: Device, options: EngineOptions) -> None:
        self.name, self.stored = name, stored
        self._reader, self._device, self._options = reader, device, options

    def get_shape(self) -> list[int]:
        """Return the shape, as the file has it: a pair of 4-bit numbers counts as two elements."""
        shape = list(self.stored.shape)
        packed = PACKED.get(self.get_dtype(), 1)
        return shape if packed == 1 else [*shape[:-1], shape[-1] * packed]

    def get_dtype(self) -> str:
        """Return the dtype, as the file has it ("F32")."""
        return code_of(self.stored.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part of the tensor, or all of it (``[...]``).

        Numbers, slices, ``...`` and None read the rows that they need. Other indexes read the whole
        tensor first.

        Returns:
            A contiguous tensor with the values of ``tensor[index]``.

        Raises:
            IndexError, ValueError, TypeError: as torch's, for such an index.
            IoError, CorruptData: as `safe_open.get_tensor`.

        Stream semantics: the bytes are in place when this returns, for every stream.
        """
        device = resolved(self._device)
        if not _is_simple(index):
            return self._reader.get(self.name, torch.device("cpu"))[index].to(device)
        shape = self.stored.shape
        view = torch.empty(shape, dtype=self.stored.dtype, device="meta")[index]
        if view.shape == shape:
            return self._reader.get(self.name, device)
        first = self.stored.offset + int(view.storage_offset()) * view.itemsize
        part = self.stored._replace(offset=first, shape=tuple(view.shape), stride=view.stride())
        if (cached := self._reader.cached_part(part, device)) is not None:
            return cached
        target = torch.empty(part.shape, dtype=part.dtype, device=device)
        reader = TensorReader(self._options, verify=False)
        reader.tensor_into(target, part, (self.name,))
        reader.run()
        return target


def resolved(device: Device) -> torch.device:
    """Return a device with its index.

    Raises:
        BackendUnavailable: there is no such GPU.
    """
    return engine.resolved(f"cuda:{device}" if isinstance(device, int) else device)


def _is_served(device: Any) -> bool:
    if device is None or type(device) is int:
        return True
    try:
        return engine.reaches(torch.device(device))
    except (RuntimeError, TypeError):
        return False


def _is_simple(index: Any) -> bool:
    """Return whether indexing with this makes a view, whatever the tensor."""
    if isinstance(index, tuple):
        return all(not isinstance(one, tuple) and _is_simple(one) for one in index)
    if index is None or isinstance(index, (slice, EllipsisType)):
        return True
    if isinstance(index, (bool, torch.Tensor)):
        return False
    try:
        operator.index(index)
    except TypeError:
        return False
    return True


def _what_else(file: OpenFile) -> str | None:
    """Return the message for a file that is of another kind. None: it may be a safetensors file."""
    if file.path.endswith(".json"):
        return f"'{file.path}' is no safetensors file. An index of several is read by gdsdata.load({file.path!r})"
    head = file.read(0, HEAD_BYTES)
    other = None if recognises(head) else foreign_file(f"'{file.path}'", head)
    if other is None and head.startswith(ZIP_MAGIC):
        return f"'{file.path}' is a file of torch.save, or another zip: read it by gdsdata.load({file.path!r})"
    return None if other is None else str(other)
