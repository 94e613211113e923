"""torch's global switches for torch.save and torch.load that gdsdata follows.

Source: torch.utils.serialization.config and the setters in torch.serialization.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.serialization import config

from gdsdata.checkpoint.partial_pages import PAGE_BYTES

SMALL_ALIGNMENT = 64


def is_alignment_served() -> bool:
    """Return whether records can have the alignment that torch is set to.

    Large records lie on whole pages.
    """
    return config.save.storage_alignment > 0 and PAGE_BYTES % config.save.storage_alignment == 0


def alignment_bytes() -> int:
    """Return the alignment of records that are shorter than a page, in bytes."""
    return max(config.save.storage_alignment, SMALL_ALIGNMENT) if is_alignment_served() else SMALL_ALIGNMENT


def has_checksums() -> bool:
    """Return whether archives get checksums.

    They get none after ``torch.serialization.set_crc32_options(False)``.
    """
    return config.save.compute_crc32


def assumed_byte_order() -> bytes:
    """Return the byte order that torch assumes for a file that does not state its own."""
    assumed = torch.serialization.get_default_load_endianness()
    if assumed is torch.serialization.LoadEndianness.NATIVE:
        return sys.byteorder.encode()
    return b"big" if assumed is torch.serialization.LoadEndianness.BIG else b"little"
