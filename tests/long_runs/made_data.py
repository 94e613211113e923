"""Data sets whose every byte is known. Each sample contains its number."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdsdata import Fields, formats


class WrongBytes(AssertionError):
    """A batch does not have the bytes that were written."""


class Made:
    """Files of one kind, and the check of their batches.

    Attributes:
        files: contents by name.
        arguments: of GDSDataset.
        samples: how many there are.
    """

    files: dict[str, bytes]
    arguments: dict[str, Any]
    samples: int

    def numbers(self, batch: Any) -> list[int]:
        """Return the numbers of a batch's samples.

        Raises:
            WrongBytes: a sample is not what was written.
        """
        raise NotImplementedError

    def write(self, folder: Path) -> None:
        """Write the files. An existing one is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            part = folder / f".{name}.part"
            part.write_bytes(content)
            part.rename(folder / name)


class Rows(Made):
    """Samples of one size, as the rows of an array."""

    rows: np.ndarray

    def number_of(self, rows: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def numbers(self, batch: torch.Tensor) -> list[int]:
        rows = batch.cpu().numpy().reshape(len(batch), -1)
        numbers = self.number_of(rows)
        if (numbers < 0).any() or (numbers >= self.samples).any() or not np.array_equal(rows, self.rows[numbers]):
            raise WrongBytes(f"{type(self).__name__}: samples {numbers.tolist()[:20]} are not what was written")
        return numbers.tolist()


class MadeRecords(Rows):
    SAMPLES, BYTES, FILES = 192, 16384, 3

    def __init__(self, random: np.random.Generator) -> None:
        self.samples = self.SAMPLES
        self.rows = random.integers(0, 256, (self.SAMPLES, self.BYTES), np.uint8)
        self.rows[:, :4] = np.arange(self.SAMPLES, dtype="<u4").view(np.uint8).reshape(-1, 4)
        parts = np.split(self.rows, self.FILES)
        self.files = {f"{place}.bin": part.tobytes() for place, part in enumerate(parts)}
        self.arguments = {"format": formats.Records("u1", (self.BYTES,))}

    def number_of(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, :4].copy().view("<u4")[:, 0].astype(np.int64)


class MadeVolumes(Rows):
    SAMPLES, SIDE = 24, 24

    def __init__(self, random: np.random.Generator) -> None:
        self.samples = self.SAMPLES
        volumes = random.standard_normal((self.SAMPLES, self.SIDE, self.SIDE, self.SIDE), np.float32)
        volumes[:, 0, 0, 0] = np.arange(self.SAMPLES)
        self.rows = volumes.reshape(self.SAMPLES, -1)
        self.files = {f"{place:03}.npy": _npy(volume) for place, volume in enumerate(volumes)}
        self.arguments = {"format": formats.Npy()}

    def number_of(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, 0].astype(np.int64)


class MadeTokens(Rows):
    WINDOWS, LENGTH, FILES = 3000, 256, 2

    def __init__(self, random: np.random.Generator) -> None:
        self.samples = self.WINDOWS
        tokens = random.integers(0, 50_000, (self.WINDOWS, self.LENGTH), np.uint16)
        tokens[:, 0] = np.arange(self.WINDOWS)
        self.rows = tokens.astype(np.int64)
        self.files = {f"{place}.bin": part.tobytes() for place, part in enumerate(np.split(tokens, self.FILES))}
        self.arguments = {"format": formats.Tokens("uint16", seq_len=self.LENGTH - 1, stride=self.LENGTH)}

    def number_of(self, rows: np.ndarray) -> np.ndarray:
        return rows[:, 0]


class MadeShards(Made):
    """Tar shards of samples with two members, one of which has any length."""

    SAMPLES, SHARDS, MOST_BYTES = 80, 2, 40_000

    def __init__(self, random: np.random.Generator) -> None:
        self.samples = self.SAMPLES
        lengths = random.integers(1, self.MOST_BYTES, self.SAMPLES)
        self.values = [random.integers(0, 256, length, np.uint8) for length in lengths]
        numbers = np.array_split(np.arange(self.SAMPLES), self.SHARDS)
        self.files = {f"{place}.tar": self._shard(part.tolist()) for place, part in enumerate(numbers)}
        self.arguments = {"format": formats.Tar(), "fields": Fields(decode={"cls": "cls"})}

    def _shard(self, numbers: list[int]) -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for number in numbers:
                for extension, content in (("bin", self.values[number].tobytes()), ("cls", b"%d" % number)):
                    member = tarfile.TarInfo(f"{number:04}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
        return stream.getvalue()

    def numbers(self, batch: dict[str, Any]) -> list[int]:
        numbers = batch["cls"].tolist()
        values, offsets = batch["bin"].values.cpu().numpy(), batch["bin"].offsets.tolist()
        for number, begin, end in zip(numbers, offsets[:-1], offsets[1:], strict=True):
            if not np.array_equal(values[begin:end], self.values[number]):
                raise WrongBytes(f"MadeShards: sample {number} is not what was written")
        return numbers


def _npy(values: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


KINDS: dict[str, Callable[[np.random.Generator], Made]] = {
    "records": MadeRecords,
    "npy": MadeVolumes,
    "tokens": MadeTokens,
    "tar": MadeShards,
}


def make(kind: str, *seed: int) -> Made:
    """Make the data of a kind. Equal seeds make equal data."""
    return KINDS[kind](np.random.default_rng(seed))


def check_epoch(made: Made, numbers: list[int]) -> None:
    """Raise `WrongBytes` unless these are all samples, each once."""
    if sorted(numbers) != list(range(made.samples)):
        raise WrongBytes(f"{type(made).__name__}: an epoch has {len(numbers)} of {made.samples} samples")
