"""`WindowReader`: batches of windows of tokens, in however many pieces they lie."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from gdsdata.data.batches.engine_reader import BatchRead, Destination, EngineReader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.formats.windows import WindowIndex
from gdsdata.io import engine
from gdsdata.io.conversions import conversion_on
from gdsdata.io.memory import MemoryPool

if TYPE_CHECKING:
    from gdsdata.data.batches.pieces import OpenPieces


class WindowReader(EngineReader[WindowIndex]):
    """Reads windows. A batch is ``(B, tokens)``, of the dtype that the index says.

    Args:
        index: of the samples.
        settings: of the batches.
        shared: the engine of ``settings.device``.
        files: its table of the files of ``index``, and of those of ``pieces``.
        memory: of batches on the CPU, kept from epoch to epoch.
        pieces: as of `Reader`.
    """

    def __init__(
        self,
        index: WindowIndex,
        settings: BatchSettings,
        shared: engine.Engine,
        files: engine.FileTable,
        memory: MemoryPool | None = None,
        pieces: OpenPieces | None = None,
    ) -> None:
        conversion, self._dtype = conversion_on(settings.device.type == "cuda", index.sample)
        growth = self._dtype.itemsize // index.sample.dtype.itemsize
        destinations = (Destination(shared, settings.device, [0], slice(None)),)
        readers = ThreadPoolExecutor(1, "gdsdata-windows")
        super().__init__(index, settings, readers, files, destinations, memory, pieces, conversion, growth)

    def _batch_of(self, begun: BatchRead) -> torch.Tensor:
        sample = self.index.sample
        return begun.read.flat[0].view(self._dtype).to(sample.torch_dtype).view(-1, *sample.shape)

    def _check(self, begun: BatchRead) -> None:
        """Raise nothing: every window that has come is sound."""
