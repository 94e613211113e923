"""`PlannedLoad`: tensors of files that are named first, and taken afterwards."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from gdsdata.checkpoint.hooks_report import COUNTS
from gdsdata.checkpoint.safetensors.opened import OPENED, SafeSlice
from gdsdata.checkpoint.stored import Stored
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.io.options import EngineOptions

_BATCH_BYTES = 256 << 20
_BATCHES_AHEAD = 3

_Key = tuple[str, torch.device]


class PlannedLoad:
    """Reads tensors in batches, straight to their devices. One thread uses it.

    A batch has at most 256 MiB, or one larger tensor. Tensors are taken in the order in which they
    were added, or nearly. The first batches are read while more tensors are added. A later one is
    begun when a tensor is taken from it, or from one of the three before it. So at most four
    batches are in memory, besides tensors that were taken and those that were passed over.
    """

    def __init__(self) -> None:
        self._batches = [_Batch()]
        self._begun = 0

    def add(self, tensor: SafeSlice, device: torch.device, dtype: torch.dtype | None) -> Future[torch.Tensor]:
        """Add a tensor, and return its future. The name is that of no other one.

        Args:
            tensor: of a file.
            device: to read it to, with its index.
            dtype: of the result; None: as in the file.

        The future's ``result()`` raises IoError, CorruptData and StallError as `gdsdata.load` does,
        each time it is called, also if another tensor of the batch is the reason.

        Raises:
            MemoryError, torch.OutOfMemoryError: there is none for a batch that begins now. The
                future's ``result()`` raises the same for a batch that it begins.

        Stream semantics: the bytes are in place when ``result()`` returns, for every stream. A cast
        is on the current stream of the thread that calls it.
        """
        last = self._batches[-1].size_bytes
        if last and last + tensor.stored.size_bytes > _BATCH_BYTES:
            self._batches.append(_Batch())
            self._begin(min(len(self._batches) - 1, 1 + _BATCHES_AHEAD))
        self._batches[-1].add(tensor, device)
        return _Tensor(self, len(self._batches) - 1, (tensor.name, device), dtype)

    def take(self, batch: int, key: _Key) -> torch.Tensor:
        """Return a tensor of a batch, and begin the batches behind it. `drop` forgets it."""
        with COUNTS.timed(OPENED, calls=0) as sizes_bytes:
            self._begin(min(len(self._batches), batch + 1 + _BATCHES_AHEAD))
            found = self._batches[batch].take(key)
            sizes_bytes.append(found.nbytes)
        return found

    def drop(self, batch: int, key: _Key) -> None:
        """Do not hold a tensor that was taken."""
        self._batches[batch].drop(key)

    def _begin(self, count: int) -> None:
        for batch in self._batches[self._begun : count]:
            batch.begin()
        self._begun = max(self._begun, count)


class _Batch:
    """Tensors whose reads begin together."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._wanted: dict[torch.device, dict[tuple[str | int, ...], Stored]] = {}
        self._made: dict[_Key, torch.Tensor] = {}
        self._reader: TensorReader | None = None

    def add(self, tensor: SafeSlice, device: torch.device) -> None:
        self._wanted.setdefault(device, {})[(tensor.name,)] = tensor.stored
        self.size_bytes += tensor.stored.size_bytes

    def begin(self) -> None:
        self._reader = TensorReader(EngineOptions(), verify=False)
        for device, wanted in self._wanted.items():
            made = self._reader.tensors(wanted, device)
            self._made.update({(str(path[0]), device): tensor for path, tensor in made.items()})
        self._reader.begin()

    def take(self, key: _Key) -> torch.Tensor:
        if self._reader is not None:
            self._reader.run()
            self._reader = None
        return self._made[key]

    def drop(self, key: _Key) -> None:
        del self._made[key]


class _Tensor(Future[torch.Tensor]):
    """A tensor of a batch. It is taken when the result is first asked for."""

    def __init__(self, load: PlannedLoad, batch: int, key: _Key, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._load, self._batch, self._key, self._dtype = load, batch, key, dtype

    def result(self, timeout: float | None = None) -> torch.Tensor:
        if not self.done():
            self.set_result(self._load.take(self._batch, self._key).to(dtype=self._dtype))
            self._load.drop(self._batch, self._key)  # not before: Ctrl-C may come
        return super().result()
