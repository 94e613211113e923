"""`BatchSettings`: a data set's arguments that say how its batches are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gdsdata.io.options import EngineOptions

# Modules that only some data sets need are imported by these: a program pays for what it uses.
if TYPE_CHECKING:
    from gdsdata.data.batches.ragged import RaggedAs
    from gdsdata.data.batches.skipped import Skipped
    from gdsdata.decoders import Decoder, Image
    from gdsdata.storage.settings import RemoteSettings

# Gets a list of samples, each a dict of the fields that it has, and returns the batch.
Collate = Callable[[list[dict[str, Any]]], Any]


class BatchSettings(NamedTuple):
    """The arguments that readers are made from, besides the index.

    Attributes:
        device: of the batches.
        options: of the engine that makes them.
        piece_options: of the engine that reads the pieces of a lane shuffle.
        batch_size: samples in a batch, at most.
        prefetch: batches in flight or ready ahead of the consumer.
        zero_copy, residency, ragged, decode, collate: as of `GDSDataset`.
        skipped: counts bad samples, which are left out; None: they are errors.
        remote: how objects are reached; None: there are only files.
    """

    device: torch.device
    options: EngineOptions
    piece_options: EngineOptions = EngineOptions()
    batch_size: int = 1
    prefetch: int = 4
    zero_copy: bool = False
    residency: str | None = None
    ragged: RaggedAs = "flat"
    decode: Mapping[str, Decoder | Image] = MappingProxyType({})
    collate: Collate | None = None
    skipped: Skipped | None = None
    remote: RemoteSettings | None = None
