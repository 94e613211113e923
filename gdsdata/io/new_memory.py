"""Memory for reads: on the CPU in huge pages, if the system has them.

Touching new memory page by page takes longer than the read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gdsdata.io.engine import prefer_huge_pages

_HUGE_PAGE_BYTES = 2 << 20  # shorter memory has none


def new_storage(size_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """Allocate a storage."""
    storage = torch.UntypedStorage(size_bytes, device=device)  # type: ignore[no-untyped-call]
    if size_bytes >= _HUGE_PAGE_BYTES and device.type == "cpu":
        prefer_huge_pages(storage)
    return storage


def new_tensor(
    shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate a tensor whose storage has no other bytes. Without ``stride`` it is contiguous."""
    if stride is None:
        tensor = torch.empty(shape, dtype=dtype, device=device)
    else:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if tensor.nbytes >= _HUGE_PAGE_BYTES and device.type == "cpu":
        prefer_huge_pages(tensor)
    return tensor
