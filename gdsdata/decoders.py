"""Named decoders of fields: what becomes of the bytes of a batch's samples."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch

from gdsdata.formats import npy
from gdsdata.formats.index import torch_equivalent

# Of each sample its bytes, uint8 of one dimension, on the CPU; returns what the batch then has for the field.
Decoder = Callable[[Sequence[torch.Tensor]], Any]


class Undecodable(ValueError):
    """A sample's bytes are not what the decoder takes.

    Attributes:
        sample: its place in the batch.
    """

    def __init__(self, sample: int, why: str) -> None:
        super().__init__(why)
        self.sample = sample


def decode_cls(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Whole numbers in decimal digits: int64 (B,)."""
    return torch.tensor(_each(samples, lambda sample: int(_bytes_of(sample))), dtype=torch.int64)


def decode_txt(samples: Sequence[torch.Tensor]) -> list[str]:
    """UTF-8."""
    return _each(samples, lambda sample: _bytes_of(sample).decode())


def decode_json(samples: Sequence[torch.Tensor]) -> list[Any]:
    """What `json.loads` makes of each."""
    return _each(samples, lambda sample: json.loads(_bytes_of(sample)))


def decode_npy(samples: Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """npy files: (B, *shape) where all are alike, else a list."""
    return _stacked(_each(samples, _decode_one_npy))


def decode_image(samples: Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """JPEG, PNG, WebP and what else torchvision decodes: uint8 (B, 3, height, width) where all are of one size, else a
    list. Needs the extra ``gdsdata[images]``.
    """
    vision = _torchvision()
    return _stacked(_each(samples, lambda sample: vision.decode_image(sample, mode=vision.ImageReadMode.RGB)))


DECODERS: dict[str, Decoder] = {
    "cls": decode_cls,
    "txt": decode_txt,
    "json": decode_json,
    "npy": decode_npy,
    "image": decode_image,
}


def decoder_of(said: str | Decoder) -> Decoder:
    """The decoder of that name, or the one that is given.

    Raises:
        ValueError: there is none of that name.
        ImportError: it needs an extra that is not installed.
    """
    if callable(said):
        return said
    if said not in DECODERS:
        raise ValueError(f"decode={said!r}: it is a function or one of {', '.join(map(repr, DECODERS))}")
    if said == "image":
        _torchvision()
    return DECODERS[said]


def _each(samples: Sequence[torch.Tensor], decode: Callable[[torch.Tensor], Any]) -> list[Any]:
    values = []
    for i, sample in enumerate(samples):
        try:
            values.append(decode(sample))
        except (ValueError, RuntimeError, RecursionError) as error:  # torchvision's are RuntimeErrors
            raise Undecodable(i, str(error).splitlines()[0]) from error
    return values


def _stacked(values: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    alike = all(one.shape == values[0].shape and one.dtype == values[0].dtype for one in values)
    return torch.stack(values) if alike else values


def _bytes_of(sample: torch.Tensor) -> bytes:
    return sample.numpy().tobytes()


def _decode_one_npy(sample: torch.Tensor) -> torch.Tensor:
    content = sample.numpy()
    header = npy.parse_header(_bytes_of(sample[: npy.LONGEST_HEADER_BYTES]), "the sample")
    if header.data_offset + header.data_bytes > len(content):
        raise ValueError(f"its header says {header.data_bytes} bytes of data, and {len(content)} are all")
    data = content[header.data_offset : header.data_offset + header.data_bytes]
    values = data.view(header.dtype).reshape(header.shape, order="F" if header.fortran_order else "C")
    torch_equivalent(header.dtype)  # says what torch lacks
    return torch.from_numpy(np.ascontiguousarray(values, header.dtype.newbyteorder("=")))


def _torchvision() -> ModuleType:
    try:
        return importlib.import_module("torchvision.io")
    except ImportError as error:
        raise ImportError(f"decoding images needs torchvision ({error}): pip install 'gdsdata[images]'") from error
