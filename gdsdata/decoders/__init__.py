"""Named decoders of fields: what becomes of the bytes of a batch's samples."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from operator import index as index_of
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from gdsdata.decoders import images
from gdsdata.formats import npy
from gdsdata.formats.sample import torch_equivalent
from gdsdata.io import engine
from gdsdata.io.budget import share_of_cores
from gdsdata.io.memory import MemoryPool

T = TypeVar("T")

# It takes the bytes of each sample (uint8, one dimension, on the CPU), and returns the field's
# value in the batch.
Decoder = Callable[[Sequence[torch.Tensor]], Any]


class Undecodable(ValueError):
    """The decoder cannot decode a sample's bytes.

    Attributes:
        sample: its place in the batch.
    """

    def __init__(self, sample: int, why: str) -> None:
        super().__init__(why)
        self.sample = sample


def decode_cls(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """Decode whole numbers in decimal digits: int64 (B,)."""
    return torch.tensor(_each(samples, _decode_one_cls), dtype=torch.int64)


def decode_txt(samples: Sequence[torch.Tensor]) -> list[str]:
    """Decode UTF-8."""
    return _each(samples, lambda sample: _bytes_of(sample).decode())


def decode_json(samples: Sequence[torch.Tensor]) -> list[Any]:
    """Parse each sample by `json.loads`."""
    return _each(samples, lambda sample: json.loads(_bytes_of(sample)))


def decode_npy(samples: Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Decode npy files: (B, *shape) if all have one shape and dtype, else a list."""
    return _stacked(_each(samples, _decode_one_npy))


def keep_encoded(samples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Keep each sample's bytes (uint8, one dimension) for a later decoder.

    They are in host memory, which is pinned if the data set's device is a GPU. See
    `gdsdata.integrations.dali`.
    """
    return list(samples)


class Threads:
    """Threads that share the samples of batches, one for each core of this process; and memory.

    Args:
        most_kept: how many dropped batches' memory is kept for later ones. New pages would take a
            quarter of the time of decoding.
    """

    def __init__(self, most_kept: int) -> None:
        self._count = share_of_cores()
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="gdsdata-decode")
        self._memory = MemoryPool(most_kept, least_bytes=0)  # a batch is one buffer, however small

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Return uint8 (size_bytes,), used by no other batch while a view of it exists."""
        return self._memory.take(size_bytes)

    def each(self, work: Callable[[int], T], count: int) -> list[T]:
        """Return ``work(i)`` for each i below ``count``; raise the first error in order."""
        bounds = [count * i // self._count for i in range(self._count + 1)]
        shares = [self._pool.submit(list, map(work, range(a, b))) for a, b in pairwise(bounds) if a < b]
        return [value for share in shares for value in share.result()]

    def close(self, wait: bool) -> None:
        """Take no more work, and, with ``wait``, return when the work that was taken has ended."""
        self._pool.shutdown(wait=wait)


class _Batch:
    """The images of a batch, in one tensor if they have the first one's size.

    An image is copied there while it is in the processor's caches, and its own memory is then free
    for the next image. NumPy copies it, because torch would wake as many threads again for each of
    these threads.
    """

    def __init__(self, count: int, threads: Threads) -> None:
        self._threads = threads
        self._others: list[torch.Tensor | None] = [None] * count
        self._together: torch.Tensor | None = None
        self._making = threading.Lock()

    def put(self, i: int, image: torch.Tensor) -> None:
        with self._making:
            if self._together is None:
                self._together = self._memory_for(image)
        if image.shape == self._together.shape[1:]:
            np.copyto(self._together[i].numpy(), image.numpy())
        else:
            self._others[i] = image

    def _memory_for(self, image: torch.Tensor) -> torch.Tensor:
        memory = self._threads.memory(len(self._others) * image.numel())
        if image[None].is_contiguous(memory_format=torch.channels_last):
            channels, height, width = image.shape
            return memory.view(-1, height, width, channels).permute(0, 3, 1, 2)
        return memory.view(-1, *image.shape)

    def images(self) -> torch.Tensor | list[torch.Tensor]:
        together = self._together
        if together is None:  # nothing was put
            return []
        if all(one is None for one in self._others):
            return together
        return [together[i] if one is None else one for i, one in enumerate(self._others)]


@dataclass(frozen=True)
class Image:
    """Decodes JPEG, PNG, WebP and GIF to uint8.

    The decoder is torchcodec (0.16 or later) or torchvision. ``"image"`` stands for ``Image()``.

    A batch is uint8 ``(B, 3, height, width)`` with ``resize`` or if all images have one size, else
    a list of ``(3, height, width)``. On the CPU its memory is as decoders leave it, mostly with the
    channels innermost (``torch.channels_last``).

    Images are turned upright, as EXIF says. Transparency is dropped. Other colors (gray, palette,
    CMYK) become RGB, and 16 bits become 8. The first picture of an animation is decoded, in WebP by
    torchcodec alone.

    On a GPU, nvJPEG decodes JPEGs. Its values differ from the CPU's by a few levels. JPEGs that
    `images.is_plain_jpeg` excludes are decoded on the CPU and copied, as are all other images.

    Attributes:
        resize: (height, width) of all images, whatever their proportions. Bilinear and antialiased,
            as in ``torch.nn.functional.interpolate``. None: each keeps its size.
        mode: ``"RGB"``, or ``"GRAY"`` with one channel instead of three.
        most_pixels: of an image, before it is resized. A JPEG, PNG or GIF whose header says more is
            undecodable, because few bytes can become any number of pixels.
    """

    resize: tuple[int, int] | None = None
    mode: Literal["RGB", "GRAY"] = "RGB"
    most_pixels: int = 2**28

    def __post_init__(self) -> None:
        if self.mode not in ("RGB", "GRAY"):
            raise ValueError(f'Image(mode={self.mode!r}): it is "RGB" or "GRAY"')
        refused = f"Image(most_pixels={self.most_pixels!r}): it is a whole number of pixels, 1 or more"
        if isinstance(self.most_pixels, bool) or not hasattr(self.most_pixels, "__index__"):
            raise TypeError(refused)
        if index_of(self.most_pixels) < 1:
            raise ValueError(refused)
        if self.resize is None:
            return
        refused = f"Image(resize={self.resize!r}): it is (height, width) in pixels, as in (224, 224)"
        try:
            sides = tuple(map(index_of, self.resize))
        except TypeError:
            raise TypeError(refused) from None
        if len(sides) != 2 or min(sides) < 1:
            raise ValueError(refused)

    def decode(
        self, samples: Sequence[torch.Tensor], device: torch.device, threads: Threads
    ) -> torch.Tensor | list[torch.Tensor]:
        """Return the images on ``device``; on a GPU, for the current stream.

        Raises:
            Undecodable: a sample is no image, or damaged.
        """
        if device.type == "cuda":
            return _stacked([self._fitted(image) for image in self._decoded_on_gpu(samples, device, threads)])
        batch = _Batch(len(samples), threads)
        threads.each(lambda i: batch.put(i, self._fitted(self._decoded(samples, i))), len(samples))
        return batch.images()

    def _decoded(self, samples: Sequence[torch.Tensor], i: int) -> torch.Tensor:
        return _value_of(samples, i, self._decoded_one)

    def _decoded_one(self, sample: torch.Tensor) -> torch.Tensor:
        if (pixels := images.pixels_of(sample)) > self.most_pixels:
            raise ValueError(f"its header says {pixels} pixels, more than Image(most_pixels={self.most_pixels}) allows")
        return images.codec().decode(sample, self.mode)

    def _is_for_gpu(self, sample: torch.Tensor) -> bool:
        return images.is_plain_jpeg(sample) and images.pixels_of(sample) <= self.most_pixels

    def _fitted(self, image: torch.Tensor) -> torch.Tensor:
        return image if self.resize is None else images.resized(image, self.resize)

    def _decoded_on_gpu(
        self, samples: Sequence[torch.Tensor], device: torch.device, threads: Threads
    ) -> list[torch.Tensor]:
        plain, refused, decoded = [i for i, sample in enumerate(samples) if self._is_for_gpu(sample)], "", {}
        if plain:
            try:
                there = images.codec().decode_jpegs([samples[i] for i in plain], self.mode, device)
                decoded = dict(zip(plain, there, strict=True))
            except (RuntimeError, ValueError) as error:  # the CPU decodes them, or names the bad one
                refused = _first_line(error)
        others = [i for i in range(len(samples)) if i not in decoded]
        on_cpu = threads.each(lambda k: self._decoded(samples, others[k]), len(others))
        if refused:
            engine.warn_once(f"JPEGs that the GPU refused were decoded on the CPU: {refused}")
        decoded.update((i, image.to(device)) for i, image in zip(others, on_cpu, strict=True))
        return [decoded[i] for i in range(len(samples))]


DECODERS: dict[str, Decoder | Image] = {
    "cls": decode_cls,
    "txt": decode_txt,
    "json": decode_json,
    "npy": decode_npy,
    "encoded": keep_encoded,
    "image": Image(),
}


def decoder_of(said: str | Decoder | Image) -> Decoder | Image:
    """Return the decoder of a name; a decoder itself is returned as it is.

    Raises:
        ValueError: no decoder has this name.
        TypeError: it is the class `Image` itself.
        ImportError: the decoder needs an extra that is not installed.
    """
    if isinstance(said, str) and said not in DECODERS or not (isinstance(said, (str, Image)) or callable(said)):
        names = ", ".join(map(repr, DECODERS))
        raise ValueError(f"decode={said!r}: it is a function, a gdsdata.decoders.Image or one of {names}")
    if isinstance(said, type) and issubclass(said, Image):  # callable, but not with samples
        raise TypeError("decode= has the class Image: write Image(), or Image(resize=...)")
    decoder = DECODERS[said] if isinstance(said, str) else said
    if isinstance(decoder, Image):
        images.codec()
    return decoder


def runs_ahead(decoder: Decoder | Image) -> bool:
    """Return whether any thread may run a decoder at any time.

    A user's function is called on the consumer's thread only.
    """
    return isinstance(decoder, Image) or decoder in DECODERS.values()


def _each(samples: Sequence[torch.Tensor], decode: Callable[[torch.Tensor], T]) -> list[T]:
    return [_value_of(samples, i, decode) for i in range(len(samples))]


def _value_of(samples: Sequence[torch.Tensor], i: int, decode: Callable[[torch.Tensor], T]) -> T:
    try:
        return decode(samples[i])
    except (ValueError, RuntimeError, RecursionError) as error:  # torchvision's are RuntimeErrors
        raise Undecodable(i, _first_line(error)) from error


def _first_line(error: Exception) -> str:
    """Return the error's first line, without the library's place in its source."""
    return re.sub(r"^.*?\.cpp:\d+, ", "", str(error).partition("\n")[0])


def _stacked(values: list[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    alike = all(one.shape == values[0].shape and one.dtype == values[0].dtype for one in values)
    return torch.stack(values) if alike else values


def _bytes_of(sample: torch.Tensor) -> bytes:
    return sample.numpy().tobytes()


def _decode_one_cls(sample: torch.Tensor) -> int:
    text = _bytes_of(sample)
    try:
        number = int(text)
    except ValueError as error:
        if not text:
            raise
        raise ValueError(f'{error}; "cls" is for numbers in digits, and "txt" for names of classes') from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"a number of {number.bit_length()} bits does not fit int64")
    return number


def _decode_one_npy(sample: torch.Tensor) -> torch.Tensor:
    content = sample.numpy()
    header = npy.parse_header(_bytes_of(sample[: npy.LONGEST_HEADER_BYTES]), "the sample")
    if header.data_offset + header.data_bytes > len(content):
        raise ValueError(f"its header says {header.data_bytes} bytes of data, but the sample has {len(content)}")
    data = content[header.data_offset : header.data_offset + header.data_bytes]
    values = data.view(header.dtype).reshape(header.shape, order="F" if header.fortran_order else "C")
    torch_equivalent(header.dtype)  # raises if torch has no such dtype
    return torch.from_numpy(np.asarray(values, header.dtype.newbyteorder("="), order="C"))
