"""Training data of torchtitan, read by gdsdata. Checkpoints: `gdsdata.integrations.torchtitan`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gdsdata.data.batch_dataset import BatchDataset
from gdsdata.data.dataset import GDSDataset
from gdsdata.data.groups import Sharding
from gdsdata.formats.index import Format
from gdsdata.formats.megatron import Megatron
from gdsdata.formats.tokens import Tokens
from gdsdata.integrations.versions import importing

with importing("torchtitan"):
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import IGNORE_INDEX

__all__ = ["GDSDataLoader"]

_STATE = "gdsdata"  # the data set's state, in that of the loader


class GDSDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Windows of tokens for torchtitan's trainer, read ahead by gdsdata's engine.

        config.dataloader = GDSDataLoader.Config(dataset_path="tokens/*.bin", dtype="uint32")

    It yields ``({"input": input, "positions": positions}, labels)``, all int64 ``(B, seq_len)`` on
    the CPU: torchtitan moves them. B is ``training.local_batch_size``; smaller last batches are
    left out. Each data-parallel rank reads its own share.

    A checkpoint has the place in the data. A run continues behind the last batch, on another number
    of data-parallel ranks too if their number times ``local_batch_size`` stays the same. Torchtitan
    stops a run whose data end (`DataloaderExhaustedError`); with ``infinite``, a new epoch begins.

    For other formats, derive a class that overrides `make_dataset`, and declare its nested
    ``Config`` again.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The data, and their order.

        Attributes:
            dataset: ``"tokens"`` (`gdsdata.formats.Tokens`) or ``"megatron"`` (.idx and .bin).
            dataset_path: files, a folder or a glob, or the URL of objects.
            dtype: of tokens in files without a header.
            seed: chooses the order.
            shuffle: the order, as of `GDSDataset`; ``"none"`` is that of the files.
            infinite: begin again behind the last batch.
            document_end: the token that ends a document. Positions begin again behind it, and its
                label is ignored. None: a window is one document.
        """

        dataset: str = "tokens"
        dtype: str = "uint16"
        seed: int = 0
        shuffle: Literal["uniform", "lanes", "auto", "none"] = "uniform"
        infinite: bool = True
        document_end: int | None = None

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self._config = config
        self._dataset: Any = self.make_dataset(config, seq_len, local_batch_size, Sharding(dp_rank, dp_world_size))

    def make_dataset(self, config: Config, seq_len: int, batch_size: int, sharding: Sharding) -> BatchDataset:
        """Return the data set: of batches of tokens, ``(batch_size, seq_len + 1)``, on the CPU.

        Raises:
            FileNotFoundError, ValueError, ...: as of `GDSDataset`, or no ``dataset_path`` is given.
        """
        formats: dict[str, Format] = {"tokens": Tokens(config.dtype, seq_len), "megatron": Megatron(seq_len)}
        if config.dataset_path is None or config.dataset not in formats:
            raise ValueError(
                f"dataloader.dataset={config.dataset!r} and dataset_path={config.dataset_path!r}: the first must be "
                "one of tokens and megatron, and the second say where the files are"
            )
        return GDSDataset(
            config.dataset_path,
            batch_size,
            formats[config.dataset],
            shuffle=False if config.shuffle == "none" else config.shuffle,
            seed=config.seed,
            device="cpu",
            drop_last=True,
            on_break="restart",
            sharding=sharding,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for tokens in self._dataset:
                yield self._sample(tokens)
            if not self._config.infinite:
                return

    def _sample(self, tokens: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs, labels = tokens[:, :-1].long(), tokens[:, 1:].long()
        positions = torch.arange(inputs.shape[1]).expand_as(inputs)
        if self._config.document_end is not None:
            ends = inputs == self._config.document_end
            labels = labels.masked_fill(ends, IGNORE_INDEX)
            begins = torch.zeros_like(positions)
            begins[:, 1:] = torch.where(ends[:, :-1], positions[:, 1:], 0)
            positions = positions - begins.cummax(1).values
        return {"input": inputs.contiguous(), "positions": positions.contiguous()}, labels.contiguous()

    def state_dict(self) -> dict[str, Any]:
        """Return the data set's state, as one string: the same on all ranks."""
        return {_STATE: json.dumps(self._dataset.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue behind the batches that a state counts, as `GDSDataset.load_state_dict`."""
        self._dataset.load_state_dict(json.loads(state_dict[_STATE]))
