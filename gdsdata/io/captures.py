"""Work on GPUs beside a thread that captures a CUDA graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from gdsdata.io.engine import exchange_capture_mode

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


@contextlib.contextmanager
def beside_captures() -> Iterator[None]:
    """Have torch's calls in the block end no capture by another thread, and not fail because of it.

    For ``with``, or as a decorator. In torch's default mode of a capture, other threads may not
    wait for an event, or copy to the CPU, unless they say that it has nothing to do with the
    capture. The engine says so for its own calls.
    """
    if not _has_captures():
        yield
        return
    own = exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        exchange_capture_mode(own)


def stay_beside_captures() -> None:
    """Do the same for all that this thread, one of this package's, does and frees from now on."""
    if _has_captures():
        exchange_capture_mode(_RELAXED)


def _has_captures() -> bool:
    """Return whether a thread may capture a CUDA graph: torch for ROCm has other graphs."""
    return torch.version.cuda is not None and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def wait_for_streams(devices: Iterable[torch.device]) -> None:
    """Wait for all work that the current streams of GPUs have so far: others may then use it."""
    for device in devices:
        if device.type == "cuda":
            with beside_captures():
                torch.cuda.current_stream(device).synchronize()
