"""The first bytes, sizes and versions of many objects."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gdsdata.progress_bars import current
from gdsdata.storage import objects, ranges

# Objects whose requests are made before the first is waited for.
_AT_ONCE = 4096


def heads_of_urls(urls: Sequence[str], head_bytes: int) -> tuple[list[bytes], np.ndarray, np.ndarray]:
    """Do for objects what `heads.read_heads` does for files."""
    known = objects.identities(urls)
    heads: list[bytes] = [b""] * len(urls)
    if head_bytes:
        for first in range(0, len(urls), _AT_ONCE):
            places = [place for place in range(first, min(first + _AT_ONCE, len(urls))) if known[place].size_bytes]
            wanted = [
                ranges.Range(urls[place], known[place], 0, min(head_bytes, known[place].size_bytes)) for place in places
            ]
            for place, head in zip(places, ranges.read_many(wanted), strict=True):
                heads[place] = head
            current("files").add(min(_AT_ONCE, len(urls) - first))
    sizes = np.array([one.size_bytes for one in known], np.int64)
    return heads, sizes, np.array([one.version for one in known], np.int64)
