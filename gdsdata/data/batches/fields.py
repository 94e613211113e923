"""Batches of samples with fields, whose sizes differ from sample to sample, read ahead by the engine."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from gdsdata.data.batches.ahead import BatchesAhead
from gdsdata.data.batches.skipped import Skipped
from gdsdata.decoders import Decoder, Image, Threads, Undecodable, keep_encoded, runs_ahead
from gdsdata.errors import CorruptData
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.formats.index import torch_equivalent
from gdsdata.formats.megatron import WindowIndex
from gdsdata.io import engine
from gdsdata.io.memory import LentMemory
from gdsdata.io.program_end import stop_at_exit
from gdsdata.io.stalls import ReadsInFlight

# Batches that are read at the same time: while one of them is planned and handed over, another is copied; and, where
# they are decoded too, a third one keeps the threads busy.
_AT_A_TIME = 2
_DECODED_AT_A_TIME = 3
# Reads that were cancelled are waited for so long; what storage has not given by then keeps its memory.
_CLOSING_S = 1.0
# Each field's values begin at a multiple of it, so that any dtype may be their view.
_ALIGNMENT_BYTES = 64

RaggedAs = Literal["flat", "nested", "padded", "list"]
# Of each sample a dict of the fields that it has; returns the batch.
Collate = Callable[[list[dict[str, Any]]], Any]


class Ragged(NamedTuple):
    """Values of B samples, one behind the other.

    Attributes:
        values: of all of them: of one dimension, or more where samples are rows of a shape (`Field.row_shape`).
        offsets: int64 (B + 1,), on the CPU: sample i has ``values[offsets[i] : offsets[i + 1]]``.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def as_list(self) -> list[torch.Tensor]:
        """A view of each sample's values."""
        return list(self.values.split(self.offsets.diff().tolist()))

    def as_nested(self) -> torch.Tensor:
        """A nested tensor (jagged layout) of the same memory."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets.to(self.values.device))

    def as_padded(self) -> torch.Tensor:
        """``(B, longest, ...)``, with zeros behind each sample's values."""
        return torch.nn.utils.rnn.pad_sequence(self.as_list(), batch_first=True)


_RAGGED_AS: dict[str, Callable[[Ragged], Any]] = {
    "flat": lambda ragged: ragged,
    "nested": Ragged.as_nested,
    "padded": Ragged.as_padded,
    "list": Ragged.as_list,
}


def moved(value: Any, device: torch.device) -> Any:
    """A batch with its tensors on ``device``, where they are values: offsets stay."""
    if isinstance(value, Ragged):
        return Ragged(moved(value.values, device), value.offsets)
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {name: moved(one, device) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        values = [moved(one, device) for one in value]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    return value


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(one)


def check_ragged_as(ragged: str) -> None:
    """
    Raises:
        ValueError: there is no such way.
    """
    if ragged not in _RAGGED_AS:
        raise ValueError(f"ragged={ragged!r}: it is one of {', '.join(map(repr, _RAGGED_AS))}")


class _Planned(NamedTuple):
    """One batch of B samples with K fields: int32 (B,), int64 (B, K) twice, and int64 (B,) (`FieldIndex.extents`)."""

    file: np.ndarray
    begin_bytes: np.ndarray
    length_bytes: np.ndarray
    sample: np.ndarray


class _Destination(NamedTuple):
    """Where fields are read to: the engine that does it, its device, and which columns of a plan they are."""

    engine: Any
    device: torch.device
    columns: list[int]


class _Read(NamedTuple):
    """The memory that some fields of a batch are read to, what the engine is asked for, and what it makes of it.

    ``checksum`` is of each transfer, and ``check`` raises if one is not as it should be.
    """

    memory: torch.Tensor
    engine: Any
    transfers: tuple[Any, ...]
    conversion: str
    checksum: str
    check: Callable[[np.ndarray], None] | None


class _Reads:
    """What the engine reads of a batch while nobody waits: a `Future` of its bytes by route, and of nothing else."""

    def __init__(self, reads: Sequence[_Read]) -> None:
        self._begun = [read.engine.begin_read(*read.transfers, read.conversion, read.checksum) for read in reads]
        self._unchecked = [(i, read.check) for i, read in enumerate(reads) if read.check is not None]

    def done(self) -> bool:
        return all(read.ended() for read in self._begun)

    def progress(self) -> Hashable:
        """See `ReadsInFlight.progress`."""
        return tuple(read.progress() for read in self._begun if not read.ended()) or None

    def exception(self, timeout: float) -> None:
        ends = time.monotonic() + timeout
        for read in self._begun:
            if not read.wait(max(0.0, ends - time.monotonic())):
                raise NotYet

    def result(self) -> tuple[dict[str, int], dict[int, Any]]:
        """The bytes and values of reads that have ended; copies to a GPU are waited for.

        Raises:
            CorruptData: a checksum differs.
        """
        self.exception(math.inf)
        routes = _sum_of([read.routes() for read in self._begun])
        for i, check in self._unchecked:
            check(self._begun[i].checksums())
        self._unchecked = []
        return routes, {}

    def result_in_thread(self, in_flight: ReadsInFlight) -> dict[str, int]:
        """Bytes by route, waited for in a thread of an iterator's."""
        return _sum_of(in_flight.routes_of(self._begun))

    def cancel(self) -> None:
        for read in self._begun:
            read.cancel()

    def let_go(self) -> None:
        """Nobody asks any more, and nobody waits; the engine may still write into the memory."""
        for read in self._begun:
            read.let_go()


class _Begun(NamedTuple):
    """A batch on its way: each sample's sizes (B, K), the memory of each column's values, and what there is when all is
    there: bytes by route, and by its column each field that is decoded ahead.
    """

    planned: _Planned
    length_bytes: np.ndarray
    flat: dict[int, torch.Tensor]
    done: Future[tuple[dict[str, int], dict[int, Any]]] | _Reads


def _sum_of(routes: Sequence[dict[str, int]]) -> dict[str, int]:
    return routes[0] if len(routes) == 1 else {route: sum(one[route] for one in routes) for route in engine.ROUTES}


def _use_own_stream(device: torch.device) -> None:
    """What this thread gives the GPU waits for no other's work, and holds none up."""
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))


class FieldBatches(BatchesAhead):
    """What `GDSDataset` takes its batches from where samples have fields.

    Args:
        shared: the engine.
        files: its table of the files of ``index``.
        index: of the samples.
        device: where they are read to, which is the engine's.
        prefetch: batches in flight or ready ahead of the consumer.
        stall_timeout_s: raise `StallError` when nothing has moved for so long.
        ragged_as: what becomes of a field whose sizes differ, and that ``decode`` does not name.
        decode: decoders of fields, which are read to the host's memory.
        host: where ``device`` is a GPU and there are decoders: an engine of the CPU, for their fields. Their memory is
            pinned; torch keeps what was once pinned, and gives it out again when nobody has a view of it any more.
        collate: makes the batch of its samples.
        skipped: takes note of bad samples, which are left out; None: they are errors.
        lent: memory of batches on the CPU, kept from epoch to epoch.
    """

    def __init__(
        self,
        shared: Any,
        files: Any,
        index: FieldIndex | WindowIndex,
        device: torch.device,
        prefetch: int,
        stall_timeout_s: float,
        ragged_as: RaggedAs,
        decode: Mapping[str, Decoder | Image],
        host: Any = None,
        collate: Collate | None = None,
        skipped: Skipped | None = None,
        lent: LentMemory | None = None,
    ) -> None:
        self._files, self._device = files, device
        self._lent = lent or LentMemory(prefetch + 2)
        self._index, self._fields = index, getattr(index, "fields", ())
        self._checksums = getattr(index, "checksums", None)
        self._ragged_as, self._decode, self._collate = _RAGGED_AS[ragged_as], decode, collate
        self._conversion, self._growth = "none", 1  # by the engine, on the way: each byte stored becomes so many
        columns = range(max(1, len(self._fields)))
        on_host = [k for k in columns if host is not None and self._fields[k].name in decode]
        elsewhere = [k for k in columns if k not in on_host]
        wanted = _Destination(host, torch.device("cpu"), on_host), _Destination(shared, device, elsewhere)
        self._destinations = [one for one in wanted if one.columns]
        self._ahead = [k for k, field in enumerate(self._fields) if runs_ahead(decode.get(field.name))]
        self._threads = Threads(prefetch + 2) if any(isinstance(one, Image) for one in decode.values()) else None
        at_a_time = min(prefetch, _DECODED_AT_A_TIME if self._ahead else _AT_A_TIME)
        set_up = partial(_use_own_stream, device) if self._ahead and device.type == "cuda" else None
        readers = ThreadPoolExecutor(at_a_time, "gdsdata-fields", set_up)
        super().__init__(prefetch, stall_timeout_s, readers, skipped)
        if self._ahead:
            stop_at_exit(self)

    def plan(
        self, file: np.ndarray, begin_bytes: np.ndarray, length_bytes: np.ndarray, sample: np.ndarray, sizes: np.ndarray
    ) -> None:
        """Batches of ``sizes`` samples each, whose extents follow one another (`FieldIndex.extents`)."""
        ends = np.cumsum(sizes)[:-1]
        self._plan(map(_Planned, *(np.split(column, ends) for column in (file, begin_bytes, length_bytes, sample))))

    def _begin(self, planned: _Planned) -> _Begun:
        """Asks for it, behind what the current stream has been given, whose memory it may get."""
        length_bytes = np.maximum(planned.length_bytes, 0)
        flat: dict[int, torch.Tensor] = {}
        reads = [self._read_of(planned, length_bytes, there, flat) for there in self._destinations]
        done = self._readers.submit(self._fetch, reads, planned, length_bytes, flat) if self._ahead else _Reads(reads)
        return _Begun(planned, length_bytes, flat, done)

    def _read_of(
        self, planned: _Planned, length_bytes: np.ndarray, there: _Destination, flat: dict[int, torch.Tensor]
    ) -> _Read:
        """Lays some fields out in memory of theirs, field after field, and puts each one's part of it into ``flat``."""
        length_bytes = length_bytes[:, there.columns]
        result_bytes = length_bytes * self._growth
        field_bytes = result_bytes.sum(0)
        begins = np.cumsum([0, *(-(-field_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)])
        memory = self._memory_for(int(begins[-1]), there.device)
        for k, begin, size in zip(there.columns, begins.tolist(), field_bytes.tolist(), strict=False):
            flat[k] = memory[begin : begin + size]
        places = begins[:-1] + np.cumsum(result_bytes, 0) - result_bytes
        wanted = length_bytes > 0
        transfers = (
            self._files,
            np.broadcast_to(planned.file[:, None], wanted.shape)[wanted],
            planned.begin_bytes[:, there.columns][wanted],
            length_bytes[wanted],
            memory,
            places[wanted],
            there.engine.mark(engine.stream_of(there.device)),
        )
        if self._checksums is None:
            return _Read(memory, there.engine, transfers, self._conversion, "none", None)
        check = partial(self._check_sums, planned, there.columns, wanted)
        return _Read(memory, there.engine, transfers, self._conversion, self._index.checksum, check)

    def _check_sums(self, planned: _Planned, columns: list[int], wanted: np.ndarray, found: np.ndarray) -> None:
        """
        Args:
            planned: the batch.
            columns: fields that were read.
            wanted: bool (B, len(columns)), which of them have bytes.
            found: uint32, the checksums of these.

        Raises:
            CorruptData: one is not the index's.
        """
        expected = self._checksums[planned.sample][:, columns]
        of_all = np.zeros_like(expected)
        of_all[wanted] = found
        if (of_all == expected).all():
            return
        i, place = np.argwhere(of_all != expected)[0].tolist()
        raise self._corrupt(
            planned,
            i,
            columns[place],
            f"has the {self._index.checksum} {of_all[i, place]:08x}, and {expected[i, place]:08x} stands in the file: "
            f'write or copy it again, or pass on_error="skip"',
        )

    def _corrupt(self, planned: _Planned, i: int, k: int, reason: str) -> CorruptData:
        """The error for column ``k`` of a batch's sample ``i``, with its place in its own file."""
        file, begins, lengths, _ = self._index.extents(planned.sample[i : i + 1])
        path, begin, length = self._index.paths[int(file[0])], int(begins[0, k]), int(lengths[0, k])
        message = f"{path}: field {self._fields[k].name!r} of {length} bytes at offset {begin} {reason}"
        return CorruptData(message, path, begin, length)

    def _memory_for(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        if device.type == self._device.type == "cpu":
            return self._lent.take(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8, device=device, pin_memory=device != self._device)

    def _fetch(
        self, reads: list[_Read], planned: _Planned, length_bytes: np.ndarray, flat: dict[int, torch.Tensor]
    ) -> tuple[dict[str, int], dict[int, Any]]:
        """On a thread of its own: reads, whoever has given up waiting, and decodes; the host waits for the GPU, so that
        what is there is there for every stream, and nothing reads the pinned bytes any more.
        """
        bytes_of = _Reads(reads).result_in_thread(self._reads)
        decoded = {k: self._decoded(planned, k, length_bytes, flat) for k in self._ahead}
        if decoded and self._device.type == "cuda":
            arrived = torch.cuda.Event(blocking=True)  # sleeps, and leaves the core to others
            arrived.record()
            arrived.synchronize()
        return bytes_of, decoded

    def _arrive(self, begun: _Begun) -> None:
        super()._arrive(begun)
        if self._device.type == "cuda":
            for tensor in _tensors_of(begun.done.result()[1]):
                if tensor.device.type == "cuda":  # memory of the stream that decoded it, and now used on this one
                    tensor.record_stream(torch.cuda.current_stream(self._device))

    def _values_of(self, begun: _Begun) -> Any:
        if self._collate is not None:
            return moved(self._collate(self._samples_of(begun)), self._device)
        return {
            field.name: self._decoded_of(begun, k)
            if field.name in self._decode
            else self._values_of_field(field, begun.flat[k], begun.length_bytes[:, k], self._ragged_as)
            for k, field in enumerate(self._fields)
        }

    def _joined(self, parts: list[_Begun]) -> _Begun:
        """Out of their memory: what came once is not read again."""
        planned = _Planned(*map(np.concatenate, zip(*(part.planned for part in parts), strict=True)))
        length_bytes = np.concatenate([part.length_bytes for part in parts])
        flat = {k: torch.cat([part.flat[k] for part in parts]) for k in parts[0].flat}
        done: Future[tuple[dict[str, int], dict[int, Any]]] = Future()
        done.set_result(({}, {}))
        return _Begun(planned, length_bytes, flat, done)

    def _check(self, begun: _Begun) -> None:
        for k, field in enumerate(self._fields):
            if field.name in self._decode:
                self._decoded_of(begun, k)

    def _samples_of(self, begun: _Begun) -> list[dict[str, Any]]:
        """Of each sample a dict of the fields that it has."""
        samples: list[dict[str, Any]] = [{} for _ in begun.length_bytes]
        for k, field in enumerate(self._fields):
            there = self._decoded_samples(begun.planned, k)
            if field.name in self._decode:
                values = self._decoded_of(begun, k)
                if not hasattr(values, "__len__") or len(values) != len(there):
                    raise ValueError(
                        f"collate= gets samples one by one, but the decoder of field {field.name!r} made "
                        f"{type(values).__name__} of {len(there)} of them: have it return a value for each"
                    )
            else:
                of_all = self._values_of_field(field, begun.flat[k], begun.length_bytes[:, k], Ragged.as_list)
                values = [of_all[i] for i in there]
            for i, value in zip(there, values, strict=True):
                samples[i][field.name] = value
        return samples

    def _decoded_samples(self, planned: _Planned, k: int) -> Sequence[int]:
        """Whose field a decoder sees: all, or for `Collate` those that have it."""
        if self._collate is None:
            return range(len(planned.file))
        return np.flatnonzero(planned.length_bytes[:, k] >= 0).tolist()

    def _decoded_of(self, begun: _Begun, k: int) -> Any:
        """What has been decoded ahead, or is now."""
        _, decoded = begun.done.result()
        if k in decoded:
            return decoded[k]
        return self._decoded(begun.planned, k, begun.length_bytes, begun.flat)

    def _decoded(self, planned: _Planned, k: int, length_bytes: np.ndarray, flat: Mapping[int, torch.Tensor]) -> Any:
        """What the decoder makes of the field of column ``k``, on the data set's device."""
        name, wanted = self._fields[k].name, self._decoded_samples(planned, k)
        of_all = flat[k].split(length_bytes[:, k].tolist())
        try:
            return self._made_of(name, [of_all[i] for i in wanted]) if len(wanted) else []
        except Undecodable as error:
            raise self._corrupt(planned, wanted[error.sample], k, f"cannot be decoded: {error}") from error

    def _made_of(self, name: str, samples: Sequence[torch.Tensor]) -> Any:
        decoder = self._decode[name]
        if isinstance(decoder, Image):
            return decoder.decode(samples, self._device, self._threads)
        return decoder(samples) if decoder is keep_encoded else moved(decoder(samples), self._device)

    @staticmethod
    def _values_of_field(
        field: Field, flat: torch.Tensor, lengths: np.ndarray, ragged_as: Callable[[Ragged], Any]
    ) -> Any:
        dtype = np.dtype(np.uint8) if field.dtype is None else field.dtype
        if dtype.newbyteorder("=") != dtype:
            width = dtype.itemsize // (2 if dtype.kind == "c" else 1)
            flat = flat.view(-1, width).flip(1).view(-1)
        typed = flat.view(field.view_as or torch_equivalent(dtype))
        if field.shape is not None and field.fortran_order:
            backwards = typed.view(len(lengths), *reversed(field.shape))
            return backwards.permute(0, *range(len(field.shape), 0, -1))
        if field.shape is not None:
            return typed.view(len(lengths), *field.shape)
        row_bytes = dtype.itemsize * math.prod(field.row_shape)
        offsets = torch.from_numpy(np.cumsum([0, *(lengths // row_bytes)]))
        return ragged_as(Ragged(typed.view(-1, *field.row_shape), offsets))

    def close(self) -> None:
        """As `BatchesAhead.close`, and decoding has ended."""
        reads = [begun.done for begun in self._begun if isinstance(begun.done, _Reads)]
        for one in reads:
            one.cancel()
        until = time.monotonic() + min(_CLOSING_S, self._stall_timeout_s)
        for one in reads:
            if not self._reads.has_stalled:
                with contextlib.suppress(NotYet):
                    one.exception(max(0.0, until - time.monotonic()))
            one.let_go()
        super().close()
        if self._threads is not None:
            self._threads.close(wait=not self._reads.has_stalled)


class WindowBatches(FieldBatches):
    """The same where a sample is a window of tokens, in however many pieces it lies (`formats.megatron.WindowIndex`).

    A batch is ``(B, tokens)``, of the dtype that the index says.
    """

    def __init__(
        self,
        shared: Any,
        files: Any,
        index: WindowIndex,
        device: torch.device,
        prefetch: int,
        stall_timeout_s: float,
        lent: LentMemory | None = None,
    ) -> None:
        super().__init__(shared, files, index, device, prefetch, stall_timeout_s, "flat", {}, lent=lent)
        self._sample = index.sample
        self._conversion, self._dtype = engine.conversion_on(device.type == "cuda", index.sample)
        self._growth = self._dtype.itemsize // index.sample.dtype.itemsize

    def plan(
        self, file: np.ndarray, begin_bytes: np.ndarray, length_bytes: np.ndarray, pieces: np.ndarray, sizes: np.ndarray
    ) -> None:
        """Batches of ``sizes`` windows each, whose pieces follow one another (`WindowIndex.extents`)."""
        begin_bytes, length_bytes = begin_bytes[:, None], length_bytes[:, None]
        in_batch = np.add.reduceat(pieces, np.cumsum([0, *sizes[:-1]]))
        super().plan(file, begin_bytes, length_bytes, np.repeat(np.arange(len(pieces)), pieces), in_batch)

    def _values_of(self, begun: _Begun) -> torch.Tensor:
        return begun.flat[0].view(self._dtype).to(self._sample.torch_dtype).view(-1, *self._sample.shape)
