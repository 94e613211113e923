"""Short storages, gathered in memory where their file will have them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from gdsdata.io import engine

# Shorter storages are put together with their headers in memory, and written as one. Writing a
# storage alone takes as long as copying so many bytes.
SHORT_BYTES = 64 << 10
# So much is gathered at a time. Several such images are in memory.
IMAGE_BYTES = 4 << 20

Column = NDArray[np.int64]


def gathered(
    size_bytes: int,
    addresses: NDArray[np.uint64],
    sizes_bytes: Column,
    places: Column,
    elsewhere: Mapping[int, torch.Tensor],
) -> NDArray[np.uint8]:
    """Return memory into which storages have been copied.

    Args:
        size_bytes: of the memory. Other bytes in it are arbitrary.
        addresses, sizes_bytes, places: where each storage lies on the CPU, its size, and its offset
            in the memory.
        elsewhere: the bytes (uint8, one dimension) of storages that lie on another device, by their
            index. Their addresses are not used.

    Stream semantics: bytes on a GPU are copied after the current work of its current stream.
    """
    image = np.empty(size_bytes, np.uint8)
    addresses = addresses.copy()
    copies = []  # until their bytes are in the memory
    for device in dict.fromkeys(one.device for one in elsewhere.values()):
        rows = [row for row, one in elsewhere.items() if one.device == device]
        copies.append(torch.cat([elsewhere[row] for row in rows]).cpu())
        begins = np.cumsum(sizes_bytes[rows]) - sizes_bytes[rows]
        addresses[rows] = copies[-1].data_ptr() + begins
    engine.copy_parts(addresses, sizes_bytes, image, places)
    return image
