"""Shards that are compressed as a whole: unpacked once, by the processor, and kept for the next time.

None of a compressed shard's samples can be read by itself, so batches come from what was unpacked.
Its name has the size and mtime of the compressed file in it, and so it is used as long as these are
the same.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import fcntl
import gzip
import hashlib
import importlib
import os
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import caches
from gdsdata.formats.shards import Shard, missing_shards_named

# What opens a stream of the unpacked bytes, and what that raises for bytes that are no such stream.
Decoder = tuple[Callable[[BinaryIO], Any], tuple[type[Exception], ...]]

# Unpacked at a time: all that a thread has in memory, with the decoder's window (128 MiB at most,
# mostly 8 or less).
_STEP_BYTES = 2**20
_MOST_THREADS = 8
_ENDING = "unpacked"
# The package of this name has these; MDSWriter takes hashes from it, too.
_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_TEMPORARY = ".tmp"
_OLD_S = 24 * 3600.0


def unpacked(shards: Sequence[Shard], where: str | None, kind: str) -> list[Shard]:
    """The shards, with the paths of those that are there compressed alone (`Shard.packed`) replaced.

    Every process can do this at once: the first one unpacks a shard, while the others wait for it.

    Args:
        shards: as index.json lists them.
        where: the place of what is unpacked: ``"user"``, ``"beside"``, or a folder (see `caches`);
            None refuses.
        kind: the format's name there.

    Raises:
        CorruptData: a shard cannot be unpacked, or has not the sizes or the hash that index.json
            says; nothing is left of it.
        ValueError: ``where`` is None, or a compression that cannot be read.
        ImportError: the package for it is lacking.
        FileNotFoundError, IoError: a file is not to be had, or there is no space for what is
            unpacked.
    """
    missing = [shard for shard in shards if shard.packed is not None and not os.path.exists(shard.path)]
    if not missing:
        return list(shards)
    decoders = {shard.compression: _decoder(shard, where) for shard in missing}
    with missing_shards_named(missing):
        targets = {shard.path: _target(shard, where, kind) for shard in missing}
    lacking = [shard for shard in missing if not _is_there(targets[shard.path], shard)]
    if lacking:
        folder = os.path.dirname(targets[lacking[0].path])
        lacking_bytes = sum(shard.size_bytes for shard in lacking)
        _require_space(folder, lacking_bytes)
        threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "gdsdata-unpacking")
        try:
            for _ in threads.map(lambda one: _unpack(one, targets[one.path], decoders[one.compression]), lacking):
                pass
        finally:
            threads.shutdown(cancel_futures=True)
        _sweep({targets[shard.path] for shard in lacking})
        warnings.warn(
            f"gdsdata: {len(lacking)} compressed shards were unpacked into {folder}, where their "
            f"{lacking_bytes / 1e9:.3g} GB stay for the next time (unpacked= chooses another place)",
            RuntimeWarning,
            stacklevel=5,
        )
    return [shard._replace(path=targets.get(shard.path, shard.path)) for shard in shards]


def is_unpacked(path: str) -> bool:
    """Whether `unpacked` has made this file."""
    return path.endswith(f".{_ENDING}")


def _decoder(shard: Shard, where: str | None) -> Decoder:
    """What unpacks a shard.

    Raises:
        ValueError: nothing does, or nothing is to.
        ImportError: the package that does is lacking.
    """
    algorithm = shard.compression.split(":")[0]  # behind it the level
    if where is not None and algorithm in _DECODERS:
        return _DECODERS[algorithm]()
    command = f"zstd -d {shard.packed} -o {shard.path}" if algorithm == "zstd" else f"unpack it as {shard.path}"
    refused = "unpacked=None" if where is None else f"only {', '.join(_DECODERS)} are unpacked here"
    raise ValueError(
        f"{shard.packed} is compressed as a whole ({shard.compression}), so none of its samples can be read by itself, "
        f"and {refused}: unpack the shards once, beside themselves ({command}), or write them without compression"
    )


def _zstd() -> Decoder:
    try:
        import zstandard
    except ImportError:
        try:
            from compression import zstd  # Python's own, from 3.14 on
        except ImportError as error:
            raise ImportError(f"unpacking zstd needs zstandard ({error}): pip install 'gdsdata[zstd]'") from error
        return zstd.open, (zstd.ZstdError, EOFError)
    decompressor = zstandard.ZstdDecompressor
    return lambda file: decompressor().stream_reader(file, read_across_frames=True, closefd=False), (
        zstandard.ZstdError,
    )


_DECODERS: dict[str, Callable[[], Decoder]] = {
    "zstd": _zstd,
    "gz": lambda: (gzip.open, (zlib.error, EOFError)),
    "bz2": lambda: (bz2.open, (EOFError,)),
}


def _target(shard: Shard, where: str, kind: str) -> str:
    try:
        status = os.stat(shard.packed)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IoError(error.errno, f"{shard.packed} cannot be read: {error.strerror}", shard.packed) from error
    return caches.place_of(shard.packed, where, kind, f"{status.st_size}-{status.st_mtime_ns}.{_ENDING}")


def _is_there(target: str, shard: Shard) -> bool:
    try:
        return os.stat(target).st_size == shard.size_bytes
    except OSError:  # what else is wrong with the place is told when it is written to
        return False


def _require_space(folder: str, size_bytes: int) -> None:
    """Refuse before the first byte what would fill the disk."""
    try:
        os.makedirs(folder, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        message = f"compressed shards cannot be unpacked into {folder}: {error.strerror}; choose another with unpacked="
        raise IoError(error.errno, message, folder) from error
    if free_bytes < size_bytes:
        raise IoError(
            errno.ENOSPC,
            f"compressed shards take {size_bytes / 1e9:.3g} GB when unpacked, and {folder} has {free_bytes / 1e9:.3g} "
            f"GB free: make space, or choose another folder with unpacked=",
            folder,
        )


def _unpack(shard: Shard, target: str, decoder: Decoder) -> None:
    """Make ``target``, which then has as many bytes as index.json says; or nothing."""
    open_stream, errors = decoder
    try:
        with open(shard.packed, "rb") as file:
            packed_bytes = os.fstat(file.fileno()).st_size
            if shard.packed_bytes not in (None, packed_bytes):
                raise _corrupt(shard, f"index.json says {shard.packed_bytes} bytes, and it has {packed_bytes}")
            # Who waits here finds the shard unpacked. Some network file systems know no locks: then
            # all unpack it.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_there(target, shard):
                return
            with caches.written(target) as out:
                try:
                    _copy(open_stream(file), out, shard)
                except errors as error:
                    raise _corrupt(shard, f"its {shard.compression} is damaged ({error})") from error
                # The size alone tells that it is whole, so no name may come to storage before the
                # bytes do.
                out.flush()
                os.fsync(out.fileno())
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is None:  # gzip's and bz2's own
            raise _corrupt(shard, f"its {shard.compression} is damaged ({error})") from error
        message = f"unpacking {shard.packed} as {target} failed: {error.strerror}; unpacked= chooses another folder"
        raise IoError(error.errno, message, shard.packed) from error


def _copy(stream: Any, out: BinaryIO, shard: Shard) -> None:
    """All of ``stream``, as long as it is no longer than the shard should be."""
    left_bytes = shard.size_bytes
    algorithm, digest = _hash_of(shard)
    with stream:
        while data := stream.read(min(_STEP_BYTES, left_bytes + 1)):
            left_bytes -= len(data)
            if left_bytes < 0:
                raise _corrupt(shard, f"unpacked it has more than the {shard.size_bytes} bytes that index.json says")
            out.write(data)
            digest.update(data)
    if left_bytes:
        has_bytes = shard.size_bytes - left_bytes
        raise _corrupt(shard, f"unpacked it has {has_bytes} bytes, and index.json says {shard.size_bytes}")
    if algorithm and digest.hexdigest() != shard.hashes[algorithm]:
        found, said = digest.hexdigest(), shard.hashes[algorithm]
        raise _corrupt(shard, f"unpacked its {algorithm} is {found[:16]}..., and index.json says {said[:16]}...")


class _NoHash:
    def update(self, data: bytes) -> None:
        """Nothing is known to compare."""


def _hash_of(shard: Shard) -> tuple[str, Any]:
    """The first of a shard's hashes that can be computed here, and what computes it; or "" and what does nothing."""
    for algorithm in sorted(shard.hashes):
        with contextlib.suppress(ValueError):
            digest = hashlib.new(algorithm, usedforsecurity=False)
            if digest.digest_size:  # one of SHAKE has any
                return algorithm, digest
        if algorithm in _XXHASHES:
            with contextlib.suppress(ImportError):
                return algorithm, getattr(importlib.import_module("xxhash"), algorithm)()
    return "", _NoHash()


def _corrupt(shard: Shard, reason: str) -> CorruptData:
    size_bytes = os.stat(shard.packed).st_size
    return CorruptData(f"{shard.packed}: {reason}; write the shard again", shard.packed, 0, size_bytes)


def _sweep(targets: set[str]) -> None:
    """Remove what was unpacked of earlier versions of these shards, and what killed processes left of any."""
    current = {target.rsplit(".", 2)[0] for target in targets}
    for folder in {os.path.dirname(target) for target in targets}:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name, _, ending = entry.path.rpartition(f".{_ENDING}")
                is_earlier = not ending and entry.path not in targets
                is_left = ending.endswith(_TEMPORARY) and entry.stat().st_mtime < time.time() - _OLD_S
                if name.rsplit(".", 1)[0] in current and (is_earlier or is_left):
                    os.unlink(entry.path)
