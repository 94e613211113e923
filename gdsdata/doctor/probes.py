"""Probes: they find out what only a try on this machine shows.

A probe takes the path and returns plain values. If it raises an exception, `attempt` returns it as
"error". A probe reads at most `READ_BYTES`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import os
import platform
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from gdsdata.errors import BackendUnavailable
from gdsdata.io import calibration, engine
from gdsdata.io.options import EngineOptions

READ_BYTES = 65536
_FILES_LOOKED_AT = 1000
# A file system answers so if it has no such kind of reads. Others, as EIO and ENOSPC, say nothing
# of them.
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class NothingToRead(Exception):
    """No file exists that the probe could read."""


@contextlib.contextmanager
def file_at(path: str) -> Iterator[str]:
    """Yield the path itself or, if it is a folder, a file to read.

    The file is one below the folder with at least `READ_BYTES`. If none is found, it is a temporary
    file in the folder. If none can be made, it is a shorter one.

    Raises:
        NothingToRead: the file is empty, or there is none.
    """
    if not os.path.isdir(path):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise NothingToRead("it is a device, a pipe or a socket, and no file")
        if not status.st_size:
            raise NothingToRead("it is empty")
        yield path
        return
    shorter = None
    for entry in itertools.islice(_files_below(path), _FILES_LOOKED_AT):
        size = _readable_bytes(entry)
        if size >= READ_BYTES:
            yield entry.path
            return
        shorter = entry.path if size else shorter
    with contextlib.ExitStack() as made:
        try:
            file = made.enter_context(tempfile.NamedTemporaryFile(dir=path, prefix=".gdsdata-doctor-"))
            file.write(bytes(READ_BYTES))
            file.flush()
        except OSError as error:  # no permission, or no space
            if shorter is None:
                raise NothingToRead(f"there is no file to read, and none can be made: {error}") from error
            yield shorter
            return
        yield file.name


def _readable_bytes(entry: os.DirEntry[str]) -> int:
    """Return the size of a file that may be read; 0 if it may not, or is gone."""
    try:
        return entry.stat().st_size if os.access(entry, os.R_OK) else 0
    except OSError:
        return 0


def _files_below(folder: str) -> Iterator[os.DirEntry[str]]:
    """Yield files, nearer ones first, as they are found: there may be millions."""
    folders = [folder]
    for inner in folders:
        with contextlib.suppress(OSError), os.scandir(inner) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry


def attempt(probe: Callable[[str], dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Make a probe return its exceptions as "error"; "empty": it had no file to read."""

    @functools.wraps(probe)
    def tried(path: str) -> dict[str, Any]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the findings report fallbacks
                return probe(path)
        except NothingToRead as error:
            return {"error": str(error), "empty": True}
        except Exception as error:
            return {"error": str(error) or type(error).__name__, "refused": _is_refusal(error)}

    return tried


def _is_refusal(error: Exception) -> bool:
    """Return whether system or engine cannot do this to a file, however sound the file is."""
    return isinstance(error, BackendUnavailable) or (isinstance(error, OSError) and error.errno in _REFUSALS)


def cuda(path: str) -> dict[str, Any]:
    """Return the CUDA versions of torch and of the driver, without initializing CUDA."""
    version = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) != 0:
            version.value = 0
    return {"torch": torch.__version__, "torch_cuda": torch.version.cuda, "driver_cuda": version.value}


def gpu(path: str) -> dict[str, Any]:
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        return {"error": f"torch {torch.__version__} with {built} sees none", "none": True}
    try:
        device = engine.resolved("cuda")
    except BackendUnavailable as error:
        return {"error": str(error)}
    return {"device": str(device), "name": torch.cuda.get_device_name(device)}


def wheels(path: str) -> dict[str, Any]:
    """Find libcufile in Python's packages."""
    for name in ("nvidia-cufile", "nvidia-cufile-cu12", "nvidia-cufile-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found = metadata.distribution(name)
            for file in found.files or ():
                if file.name == "libcufile.so.0":
                    return {"libcufile": str(file.locate()), "version": found.version}
    return {}


def io_uring(path: str) -> dict[str, Any]:
    shared = engine.shared_engine(EngineOptions(), torch.device("cpu"))
    return {"backend": shared.backend, "workers": shared.workers, "fallback_reason": shared.fallback_reason}


def processor(path: str) -> dict[str, Any]:
    return {"machine": platform.machine(), "uses": engine.processor_features()}


def direct(path: str) -> dict[str, Any]:
    with file_at(path) as file:
        size = os.path.getsize(file)
        if size < READ_BYTES:
            raise NothingToRead(f"it has {size} bytes, too few to tell")
        read_direct(file)
    return {"bytes": READ_BYTES}


def read_direct(file: str) -> None:
    options = EngineOptions(direct="always", workers=1)
    _read(file, torch.empty(READ_BYTES, dtype=torch.uint8), options)


def reading(path: str) -> dict[str, Any]:
    device = engine.resolved("cuda") if torch.cuda.is_available() else torch.device("cpu")
    with file_at(path) as file:
        into = torch.empty(min(READ_BYTES, os.path.getsize(file)), dtype=torch.uint8, device=device)
        shared, count = _read(file, into, calibration.calibrated(EngineOptions(), file, device, measure=False))
    return {"device": str(device), "bytes": count, "backend": shared.backend, "device_backend": shared.device_backend}


def gds(path: str) -> dict[str, Any]:
    """Read with cuFile alone, if DMA is possible: its driver is slow to open."""
    if not torch.cuda.is_available():
        return {"error": "torch sees no GPU"}
    if not engine.cufile_dma_is_possible():
        return {"error": "neither nvidia-fs nor P2PDMA is configured"}
    options = EngineOptions(backend="cufile", direct="always", strict=True)
    with file_at(path) as file:
        size = min(READ_BYTES, os.path.getsize(file))
        _, count = _read(file, torch.empty(size, dtype=torch.uint8, device=engine.resolved("cuda")), options)
    return {"bytes": count}


def _read(file: str, into: torch.Tensor, options: EngineOptions) -> tuple[Any, dict[str, int]]:
    """Read a file's beginning; return the engine, and the bytes by route."""
    shared = engine.shared_engine(options, into.device)
    before = shared.statistics()["bytes"]
    shared.read(file, 0, into, shared.mark(engine.stream_of(into.device)), False)
    after = shared.statistics()["bytes"]
    return shared, {way: after[way] - before[way] for way in after}


def kept_calibration(path: str) -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"error": "on the CPU nothing has to be measured"}
    place = calibration.place_of(path, engine.resolved("cuda"))
    found = calibration.load().get(place)
    return {"place": place, "kept": asdict(found) if found else None, "given_up": calibration.given_up_lately(place)}


_AT_FDCWD, _STATX_DIOALIGN, _STATX_BYTES = -100, 0x2000, 256
_MEMORY_ALIGNMENT_AT, _OFFSET_ALIGNMENT_AT = 152, 156


def alignment(path: str) -> dict[str, Any]:
    """Return O_DIRECT's alignment by statx(2).

    Its structure has stx_mask at 0, stx_dio_mem_align at 152 and stx_dio_offset_align at 156.
    """
    statx = ctypes.CDLL(None, use_errno=True).statx
    with file_at(path) as file:
        if not stat.S_ISREG(os.stat(file).st_mode):
            return {"error": "statx reports it for regular files only"}
        buffer = ctypes.create_string_buffer(_STATX_BYTES)
        if statx(_AT_FDCWD, os.fsencode(file), 0, _STATX_DIOALIGN, buffer) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file)

    def number(at: int) -> int:
        return int.from_bytes(buffer.raw[at : at + 4], "little")

    if not number(0) & _STATX_DIOALIGN:
        return {"error": "statx of this kernel or file system does not say"}
    return {"memory_bytes": number(_MEMORY_ALIGNMENT_AT), "offset_bytes": number(_OFFSET_ALIGNMENT_AT)}


PROBES: dict[str, Callable[[str], dict[str, Any]]] = {
    "cuda": attempt(cuda),
    "gpu": attempt(gpu),
    "wheels": attempt(wheels),
    "io_uring": attempt(io_uring),
    "processor": attempt(processor),
    "direct": attempt(direct),
    "alignment": attempt(alignment),
    "reading": attempt(reading),
    "gds": attempt(gds),
    "calibration": attempt(kept_calibration),
}
# The first use of a GPU that no program holds open takes seconds, and longer if there are eight.
LIMITS_S = {**dict.fromkeys(PROBES, 10.0), "gpu": 30.0, "gds": 30.0, "reading": 30.0}
