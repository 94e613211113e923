"""Single images: the library that decodes them, JPEGs for GPUs, and resizing."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch.nn.functional import interpolate

# JPEG's markers of frames in baseline, extended and progressive Huffman coding (ITU-T T.81, table
# B.1).
_FRAMES = (0xC0, 0xC1, 0xC2)
_NO_FRAMES = (0xC4, 0xC8, 0xCC)  # among the codes of frames: tables, and one that is reserved
_PNG, _GIF, _GIF_HEAD_BYTES = b"\x89PNG\r\n\x1a\n", b"GIF8", 13
_START, _END, _APP1 = b"\xff\xd8", b"\xff\xd9", 0xE1
_EXIF, _RIFF, _WEBP_EXIF = b"Exif\0\0", b"RIFF", b"EXIF"
_ORIENTATION = 0x0112  # the tag in EXIF's first directory; 1 is upright
_RGB_TO_GRAY = (0.299, 0.587, 0.114)  # ITU-R BT.601, as JPEG's own luma


class Codec(NamedTuple):
    """A library that decodes images.

    Attributes:
        name: of its package.
        decode: takes an image's bytes (uint8, on the CPU) and a mode ("RGB" or "GRAY"). Returns the
            pixels, uint8 ``(3 or 1, height, width)`` on the CPU, turned as EXIF says. Raises
            RuntimeError or ValueError.
        decode_jpegs: takes the bytes of several JPEGs (on the CPU), a mode and a CUDA device.
            Returns the pixels of each on the device; the current stream waits for them. Raises
            RuntimeError if it cannot decode one of them.
    """

    name: str
    decode: Callable[[torch.Tensor, str], torch.Tensor]
    decode_jpegs: Callable[[Sequence[torch.Tensor], str, torch.device], list[torch.Tensor]]


@functools.cache
def codec() -> Codec:
    """Return torchcodec (0.16 or later) if it is installed, else torchvision.

    torchcodec replaces torchvision's decoders.

    Raises:
        ImportError: neither is installed.
    """
    try:
        return _torchcodec()
    except (ImportError, AttributeError, RuntimeError, OSError):  # not installed, older, or without its libraries
        pass
    try:
        return _torchvision()
    except ImportError as error:
        message = f"decoding images needs torchvision or torchcodec ({error}): pip install 'gdsdata[images]'"
        raise ImportError(message) from error


def _torchcodec() -> Codec:
    library = importlib.import_module("torchcodec.decoders")
    decode_image, decode_jpeg = library.decode_image, library.decode_jpeg

    def decode(content: torch.Tensor, mode: str) -> torch.Tensor:
        image = decode_image(_opaque(content), mode=mode)
        return image[0] if image.dim() == 4 else image  # the first picture of an animation

    return Codec(
        "torchcodec", decode, lambda contents, mode, device: decode_jpeg(list(contents), mode=mode, device=device)
    )


def _torchvision() -> Codec:
    library = importlib.import_module("torchvision.io")
    modes = library.ImageReadMode

    def decode(content: torch.Tensor, mode: str) -> torch.Tensor:
        is_webp = content[:4].numpy().tobytes() == _RIFF
        asked = "RGB" if is_webp else mode  # WebP has no gray mode
        image = library.decode_image(_opaque(content), mode=modes[asked], apply_exif_orientation=True)
        image = image[0] if image.dim() == 4 else image
        if is_webp:  # torchvision turns JPEG and PNG alone
            image = _upright(image, _orientation_of_webp(content.numpy().data))
        if image.dtype == torch.uint16:
            image = ((image.to(torch.int32) * 255 + 32895) >> 16).to(torch.uint8)  # rounds x / 257
        return gray(image) if mode == "GRAY" and len(image) != 1 else image

    def decode_jpegs(contents: Sequence[torch.Tensor], mode: str, device: torch.device) -> list[torch.Tensor]:
        return library.decode_jpeg(list(contents), mode=modes[mode], device=device)

    return Codec("torchvision", decode, decode_jpegs)


def gray(image: torch.Tensor) -> torch.Tensor:
    """Return the luma of ``image`` (3, height, width): uint8 (1, height, width)."""
    weights = torch.tensor(_RGB_TO_GRAY, device=image.device).view(3, 1, 1)
    return (image * weights).sum(0, keepdim=True).round().to(torch.uint8)


def resized(image: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Resize an image (uint8, (C, height, width)): bilinear and antialiased."""
    if image.shape[1:] == size:
        return image
    if image.device.type == "cpu":
        return interpolate(image[None], size, mode="bilinear", antialias=True)[0]
    floats = interpolate(image[None].float(), size, mode="bilinear", antialias=True)[0]  # CUDA's takes no integers
    return floats.round().clamp(0, 255).to(torch.uint8)


def pixels_of(content: torch.Tensor) -> int:
    """Return how many pixels the header of a JPEG, PNG or GIF says; 0 if it is another kind.

    A WebP has at most 2**28 of them.

    Source: ITU-T T.81, B.2.2; PNG, third edition, 11.2.1; GIF89a, 18.
    """
    data = content.numpy().data
    if data[:8] == _PNG:
        return int.from_bytes(data[16:20], "big") * int.from_bytes(data[20:24], "big")
    if data[:4] == _GIF:
        return int.from_bytes(data[6:8], "little") * int.from_bytes(data[8:10], "little")
    if data[:2] != _START:
        return 0
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        if 0xC0 <= data[at + 1] <= 0xCF and data[at + 1] not in _NO_FRAMES:
            return int.from_bytes(data[at + 5 : at + 7], "big") * int.from_bytes(data[at + 7 : at + 9], "big")
        is_fill = data[at + 1] == 0xFF
        at += 1 if is_fill else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0


def is_plain_jpeg(content: torch.Tensor) -> bool:
    """Return whether the bytes are a JPEG that GPUs decode as the CPU does.

    It is in Huffman coding, of 8 bits, not CMYK, upright, and not cut off. Its markers are read up
    to the frame's, which has the bits and components. An EXIF segment comes before that.
    """
    data = content.numpy().data
    if data[:2] != _START or data[-2:] != _END:
        return False
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker in _FRAMES:
            return data[at + 4] == 8 and data[at + 9] in (1, 3)
        if marker == _APP1 and data[at + 4 : at + 10] == _EXIF and _orientation(data[at + 10 : at + 2 + length]) != 1:
            return False
        at += 2 + length
    return False


def _opaque(content: torch.Tensor) -> torch.Tensor:
    """Return a GIF without the transparency of its first picture; other images as they are.

    The decoders give a transparent pixel the color of the background, and not its own.

    Source: GIF89a, 18 to 23.
    """
    data = content.numpy().data
    if data[:4] != _GIF or len(data) <= _GIF_HEAD_BYTES:
        return content
    flags = data[_GIF_HEAD_BYTES - 3]
    at = _GIF_HEAD_BYTES + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    while at + 3 < len(data) and data[at] == 0x21:  # an extension
        if data[at + 1] == 0xF9 and data[at + 3] & 1:
            content = content.clone()
            content[at + 3] &= 0xFE
        at += 2
        while at < len(data) and data[at]:  # its blocks
            at += 1 + data[at]
        at += 1
    return content


def _orientation_of_webp(data: memoryview) -> int:
    """Return the orientation in a WebP's EXIF; 1 if it has none.

    Source: RFC 9649, 2.3 and 2.7.
    """
    at = 12
    while at + 8 <= len(data):
        end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == _WEBP_EXIF:
            tiff = data[at + 8 : end]
            return _orientation(tiff[len(_EXIF) :] if tiff[: len(_EXIF)] == _EXIF else tiff)
        at = end + end % 2
    return 1


def _upright(image: torch.Tensor, orientation: int) -> torch.Tensor:
    """Return an image (C, height, width) turned and mirrored as EXIF says."""
    if not 2 <= orientation <= 8:
        return image
    if orientation >= 5:
        image = image.transpose(1, 2)
    flipped = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}.get(orientation, ())
    return image.flip(flipped)


def _orientation(tiff: memoryview) -> int:
    """Return the orientation in the first directory of EXIF's TIFF; 1 if it has none."""
    order: Literal["little", "big"] = "little" if bytes(tiff[:2]) == b"II" else "big"
    first = int.from_bytes(tiff[4:8], order)
    for i in range(int.from_bytes(tiff[first : first + 2], order)):
        entry = tiff[first + 2 + 12 * i : first + 14 + 12 * i]
        if int.from_bytes(entry[:2], order) == _ORIENTATION:
            return int.from_bytes(entry[8:10], order)
        if len(entry) < 12:
            break
    return 1
