"""`BatchSettings`: a data set's arguments that say how its batches are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from gdsdata.io.options import EngineOptions, options_of

# Modules that only some data sets need are imported by these: a program pays for what it uses.
if TYPE_CHECKING:
    from gdsdata.data.batches.ragged import RaggedAs
    from gdsdata.data.batches.skipped import Skipped
    from gdsdata.decoders import Decoder, Image
    from gdsdata.storage.settings import RemoteSettings

# Gets a list of samples, each a dict of the fields that it has, and returns the batch.
Collate = Callable[[list[dict[str, Any]]], Any]


class BatchSettings:
    """The arguments that readers are made from, besides the index.

    Args:
        device: of the batches.
        options: of the engine that makes them.
        piece_options: of the engine that reads the pieces of a lane shuffle; None: the defaults.
        batch_size: samples in a batch, at most.
        prefetch: batches in flight or ready ahead of the consumer.
        zero_copy, residency, ragged, decode, collate: as of `GDSDataset`.
        skipped: counts bad samples, which are left out; None: they are errors.
        remote: how objects are reached; None: there are only files.
    """

    def __init__(
        self,
        device: torch.device,
        options: EngineOptions,
        piece_options: EngineOptions | None = None,
        batch_size: int = 1,
        prefetch: int = 4,
        zero_copy: bool = False,
        residency: str | None = None,
        ragged: RaggedAs = "flat",
        decode: Mapping[str, Decoder | Image] = MappingProxyType({}),
        collate: Collate | None = None,
        skipped: Skipped | None = None,
        remote: RemoteSettings | None = None,
    ) -> None:
        self.device, self.options, self.piece_options = device, options, options_of(piece_options)
        self.batch_size, self.prefetch = batch_size, prefetch
        self.zero_copy, self.residency = zero_copy, residency
        self.ragged, self.decode, self.collate = ragged, decode, collate
        self.skipped, self.remote = skipped, remote

    def but(self, **changes: Any) -> BatchSettings:
        """Return the same settings, but for ``changes``."""
        return BatchSettings(**{**vars(self), **changes})
