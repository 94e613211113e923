"""`FieldReader`: batches of samples with fields of different sizes."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gdsdata.data.batches.engine_reader import BatchRead, Check, Destination, EngineReader, Read, Reads
from gdsdata.data.batches.ragged import tensors_of
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.data.batches.values import FieldBytes, FieldValues
from gdsdata.formats.fields import FieldIndex
from gdsdata.io import engine
from gdsdata.io.captures import stay_beside_captures
from gdsdata.io.memory import MemoryPool
from gdsdata.io.program_end import stop_at_exit

if TYPE_CHECKING:
    from gdsdata.data.batches.pieces import OpenPieces

# Batches that threads decode at the same time: two that are read and copied, and a third one to
# keep the threads busy.
_DECODED_AT_A_TIME = 3


class FieldReader(EngineReader[FieldIndex]):
    """Reads samples with fields.

    Args:
        index: of the samples.
        settings: of the batches.
        shared: the engine of ``settings.device``.
        files: its table of the files of ``index``, and of those of ``pieces``.
        host: an engine of the CPU, if the device is a GPU and fields are decoded. It reads these
            fields to pinned memory. torch keeps such memory, and uses it again when no tensor views
            it.
        memory: of batches on the CPU, kept from epoch to epoch.
        pieces: as of `Reader`.
    """

    def __init__(
        self,
        index: FieldIndex,
        settings: BatchSettings,
        shared: engine.Engine,
        files: engine.FileTable,
        host: engine.Engine | None = None,
        memory: MemoryPool | None = None,
        pieces: OpenPieces | None = None,
    ) -> None:
        self._values = FieldValues(index, settings, settings.device)
        columns = list(range(len(index.fields)))
        destinations = [Destination(shared, settings.device, columns, slice(None))]
        on_host = [k for k in columns if host is not None and index.fields[k].name in settings.decode]
        if host is not None and on_host:
            elsewhere = [k for k in columns if k not in on_host]
            destinations = [
                Destination(host, torch.device("cpu"), on_host, on_host),
                Destination(shared, settings.device, elsewhere, elsewhere),
            ]
        is_on_cuda = settings.device.type == "cuda"
        set_up = partial(_use_own_stream, settings.device) if self._values.ahead and is_on_cuda else None
        readers = ThreadPoolExecutor(min(settings.prefetch, _DECODED_AT_A_TIME), "gdsdata-fields", set_up)
        super().__init__(index, settings, readers, files, destinations, memory, pieces)
        if self._values.ahead:
            stop_at_exit(self)

    def _check_of(self, samples: np.ndarray, columns: list[int], wanted: np.ndarray) -> tuple[str, Check | None]:
        if self.index.checksums is None:
            return "none", None
        expected = self.index.checksums[samples][:, columns]
        return self.index.checksum, partial(self._compare, samples, columns, wanted, expected)

    def _compare(
        self, samples: np.ndarray, columns: list[int], wanted: np.ndarray, expected: np.ndarray, found: np.ndarray
    ) -> None:
        """Compare the checksums of a batch with the index's.

        Args:
            samples, columns, wanted: as of `_check_of`.
            expected: uint32 (B, len(columns)), the index's.
            found: uint32, the checksums of the columns that have bytes.

        Raises:
            CorruptData: one is not the index's.
        """
        of_all = np.zeros_like(expected)
        of_all[wanted] = found
        if (of_all == expected).all():
            return
        i, place = np.argwhere(of_all != expected)[0].tolist()
        raise self.index.damaged(
            int(samples[i]),
            columns[place],
            f"has the {self.index.checksum} {of_all[i, place]:08x}, and {expected[i, place]:08x} stands in the file: "
            f'write or copy it again, or pass on_error="skip"',
        )

    def _presence(self, length_bytes: np.ndarray) -> np.ndarray | None:
        return length_bytes >= 0 if self._values.wants_presence else None

    def _start(self, reads: list[Read], read: FieldBytes) -> Future[tuple[dict[str, int], dict[int, Any]]] | Reads:
        return self._readers.submit(self._fetch, reads, read) if self._values.ahead else Reads(reads)

    def _fetch(self, reads: list[Read], read: FieldBytes) -> tuple[dict[str, int], dict[int, Any]]:
        """Read and decode a batch, on a thread.

        The host waits for the GPU, so that the batch is there for every stream, and the pinned
        bytes are free.
        """
        bytes_of = Reads(reads).result_in_thread(self._reads)
        decoded = {k: self._values.decode(read, k) for k in self._values.ahead}
        if decoded and self._device.type == "cuda":
            # It sleeps, and leaves the core to others.
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch does not annotate it
            arrived.record()
            arrived.synchronize()
        return bytes_of, decoded

    def _arrive(self, begun: BatchRead) -> None:
        try:
            super()._arrive(begun)
            decoded = begun.done.result()[1] if self._device.type == "cuda" else {}
        finally:
            del begun  # see `AheadReader._arrive`
        for tensor in tensors_of(decoded):
            if tensor.device.type == "cuda":  # memory of the stream that decoded it, and now used on this one
                tensor.record_stream(torch.cuda.current_stream(self._device))

    def _batch_of(self, begun: BatchRead) -> Any:
        return self._values.batch(begun.read, begun.done.result()[1])

    def _check(self, begun: BatchRead) -> None:
        self._values.check(begun.read, begun.done.result()[1])

    def close(self) -> None:
        super().close()
        self._values.close(wait=not self._reads.has_stalled)


def _use_own_stream(device: torch.device) -> None:
    """Give the thread its own stream, so it does not wait for others' work on the GPU."""
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch does not annotate it
    torch.cuda.set_stream(stream)
    stay_beside_captures()
