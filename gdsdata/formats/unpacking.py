"""Shards that are compressed as a whole: they are unpacked once and kept.

None of a compressed shard's samples can be read by itself, so batches come from the unpacked file.
Its name has the size and mtime of the compressed file in it. It is used as long as these are the
same.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import fcntl
import gzip
import hashlib
import importlib
import io
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import BinaryIO, NamedTuple, Protocol

from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import caches, litdata_frames
from gdsdata.formats.shards import Shard, missing_shards_named
from gdsdata.progress_bars import Bar, bar
from gdsdata.storage.heads import sizes_of
from gdsdata.storage.opened import exist, open_stream
from gdsdata.storage.urls import is_remote
from gdsdata.warn import warn

# Unpacked at a time: all that a thread has in memory, with the decoder's window (128 MiB at most,
# mostly 8 or less).
_STEP_BYTES = 2**20
_MOST_THREADS = 8
_ENDING = "unpacked"
# The package of this name has these; MDSWriter takes hashes from it, too.
_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_TEMPORARY = ".tmp"
# Three bytes of snappy copy 64 at most.
_MOST_SNAPPY = 22
_OLD_S = 24 * 3600.0


class _Stream(Protocol):
    """Unpacked bytes."""

    def read(self, size: int, /) -> bytes: ...

    def close(self) -> None: ...


# A function that opens a stream of a file, which should have so many unpacked bytes; and its
# exceptions for bytes that cannot be unpacked.
Decoder = tuple[Callable[[BinaryIO, int], _Stream], tuple[type[Exception], ...]]


class _Packed(NamedTuple):
    """A shard that is there compressed alone, and the path of its compressed file."""

    shard: Shard
    path: str


class _Digest(Protocol):
    """A hash of hashlib or xxhash that is being computed."""

    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def unpacked(shards: Sequence[Shard], where: str | None, kind: str) -> list[Shard]:
    """Unpack compressed shards (`Shard.packed`), and return all with their paths.

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
        FileNotFoundError, IoError: a file is not available, or there is no space for the unpacked
            files.
    """
    packed = [shard for shard in shards if shard.packed is not None]
    are_there = exist([shard.path for shard in packed])
    missing = [
        _Packed(shard, shard.packed or "") for shard, is_there in zip(packed, are_there, strict=True) if not is_there
    ]
    if not missing:
        return list(shards)
    if where is None:
        raise _refused(missing[0], "unpacked=None")
    decoders = {packed.shard.compression: _decoder(packed) for packed in missing}
    with missing_shards_named([packed.shard for packed in missing]):
        targets = {packed.shard.path: _target(packed.path, where, kind) for packed in missing}
    lacking = [packed for packed in missing if not _is_there(targets[packed.shard.path], packed.shard)]
    if lacking:
        folder = os.path.dirname(targets[lacking[0].shard.path])
        lacking_bytes = sum(packed.shard.size_bytes for packed in lacking)
        _require_space(folder, lacking_bytes)
        threads = ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "gdsdata-unpacking")
        try:
            with bar("unpacking", lacking_bytes) as shown:
                for _ in threads.map(
                    lambda one: _unpack(one, targets[one.shard.path], decoders[one.shard.compression], shown), lacking
                ):
                    pass
        finally:
            threads.shutdown(cancel_futures=True)
        _sweep({targets[packed.shard.path] for packed in lacking})
        warn(
            f"gdsdata: {len(lacking)} compressed shards were unpacked into {folder}, where their "
            f"{lacking_bytes / 1e9:.3g} GB stay for the next time (unpacked= chooses another place)"
        )
    return [shard._replace(path=targets.get(shard.path, shard.path)) for shard in shards]


def is_unpacked(path: str) -> bool:
    """Return whether `unpacked` has made this file."""
    return path.endswith(f".{_ENDING}")


def _decoder(packed: _Packed) -> Decoder:
    """Return the decoder of a shard.

    Raises:
        ValueError: there is none.
        ImportError: the package that has it is lacking.
    """
    algorithm = _algorithm(packed)
    if algorithm not in _DECODERS:
        known = ", ".join(name for name in _DECODERS if name not in litdata_frames.LEVELS)
        raise _refused(packed, f"only {known} are unpacked here")
    return _DECODERS[algorithm]()


def _algorithm(packed: _Packed) -> str:
    return packed.shard.compression.split(":")[0]  # behind it the level


def _refused(packed: _Packed, reason: str) -> ValueError:
    path = packed.shard.path
    if (level := litdata_frames.LEVELS.get(_algorithm(packed))) is not None:
        return ValueError(
            f"{packed.path} is compressed {level} by {level}, so its samples have to be unpacked, and {reason}: leave "
            f"that out, or write the shards without compression"
        )
    command = f"zstd -d {packed.path} -o {path}" if _algorithm(packed) == "zstd" else f"unpack it as {path}"
    return ValueError(
        f"{packed.path} is compressed as a whole ({packed.shard.compression}), so none of its samples can be read by "
        f"itself, and {reason}: unpack the shards once, beside themselves ({command}), or write them without "
        f"compression"
    )


def _of_any_size(opens: Callable[[BinaryIO], _Stream]) -> Callable[[BinaryIO, int], _Stream]:
    """Return a decoder's function, which does not need the size: what it reads is counted."""
    return lambda file, size_bytes: opens(file)


def _zstd() -> Decoder:
    try:
        import zstandard
    except ImportError:
        try:
            from compression import zstd  # Python's own, from 3.14 on
        except ImportError as error:
            raise ImportError(f"unpacking zstd needs zstandard ({error}): pip install 'gdsdata[zstd]'") from error
        return _of_any_size(zstd.open), (zstd.ZstdError, EOFError)
    decompressor = zstandard.ZstdDecompressor

    def unpacks(file: BinaryIO) -> _Stream:
        return decompressor().stream_reader(file, read_across_frames=True, closefd=False)

    return _of_any_size(unpacks), (zstandard.ZstdError,)


def _litdata(level: str) -> Decoder:
    unpacks, errors = _zstd()

    def opens(file: BinaryIO, size_bytes: int) -> _Stream:
        return litdata_frames.unpacking(file, level, lambda frames: unpacks(frames, size_bytes))

    return opens, (*errors, litdata_frames.NotFramed)


class _Decompressed:
    """Unpacked bytes of pyarrow's streams. The file stays open, because it may be locked."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self.read = read

    def close(self) -> None:
        pass


def _pyarrow(codec: str) -> Decoder:
    try:
        import pyarrow
    except ImportError as error:
        raise ImportError(f"unpacking {codec} needs pyarrow ({error}): pip install 'gdsdata[tables]'") from error
    open_brotli, open_snappy = partial(_brotli, pyarrow), partial(_snappy, pyarrow)
    return open_brotli if codec == "br" else open_snappy, (pyarrow.ArrowException, _NoSnappy)


def _brotli(pyarrow: ModuleType, file: BinaryIO, size_bytes: int) -> _Stream:
    return _Decompressed(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "brotli").read)


class _NoSnappy(ValueError):
    """The bytes say a length that they cannot have."""


def _snappy(pyarrow: ModuleType, file: BinaryIO, size_bytes: int) -> _Stream:
    """Unpack as a whole: without frames there is no other way.

    Source of the format: https://github.com/google/snappy, ``format_description.txt``.
    """
    packed = file.read()
    length_bytes = 0  # seven bits a byte, the lowest first
    for place, byte in enumerate(packed[:5]):
        length_bytes |= (byte & 127) << 7 * place
        if byte < 128:
            break
    # A length that lies must not become memory.
    if length_bytes != size_bytes or length_bytes > _MOST_SNAPPY * len(packed):
        raise _NoSnappy(f"its {len(packed)} bytes would become {length_bytes}, and index.json says {size_bytes}")
    return io.BytesIO(pyarrow.decompress(packed, length_bytes, codec="snappy", asbytes=True))


_DECODERS: dict[str, Callable[[], Decoder]] = {
    "zstd": _zstd,
    litdata_frames.BATCH: partial(_litdata, litdata_frames.BATCH),
    litdata_frames.SAMPLE: partial(_litdata, litdata_frames.SAMPLE),
    "gz": lambda: (_of_any_size(gzip.open), (zlib.error, EOFError)),
    "bz2": lambda: (_of_any_size(bz2.open), (EOFError,)),
    "br": partial(_pyarrow, "br"),
    "snappy": partial(_pyarrow, "snappy"),
}


def _target(path: str, where: str, kind: str) -> str:
    """Return the path of the unpacked file for the compressed one at ``path``."""
    size_bytes, mtime_ns = _stat_of(path)
    return caches.place_of(path, where, kind, f"{size_bytes}-{mtime_ns}.{_ENDING}")


def _stat_of(path: str) -> tuple[int, int]:
    """Return size in bytes, and modification time in ns or version."""
    if is_remote(path):
        (size_bytes,), (version,) = sizes_of([path])
        return int(size_bytes), int(version)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IoError.caused_by(error, f"{path} cannot be read: {error.strerror}", path) from error
    return status.st_size, status.st_mtime_ns


def _is_there(target: str, shard: Shard) -> bool:
    try:
        return os.stat(target).st_size == shard.size_bytes
    except OSError:  # writing to the place raises what else is wrong with it
        return False


def _require_space(folder: str, size_bytes: int) -> None:
    """Refuse files that would fill the disk, before the first byte is written."""
    try:
        caches.make_folder(folder)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        message = f"compressed shards cannot be unpacked into {folder}: {error.strerror}; choose another with unpacked="
        raise IoError.caused_by(error, message, folder) from error
    if free_bytes < size_bytes:
        raise IoError(
            errno.ENOSPC,
            f"compressed shards take {size_bytes / 1e9:.3g} GB when unpacked, and {folder} has {free_bytes / 1e9:.3g} "
            f"GB free: make space, or choose another folder with unpacked=",
            folder,
        )


def _unpack(packed: _Packed, target: str, decoder: Decoder, shown: Bar) -> None:
    """Make ``target``, which then has as many bytes as index.json says; or nothing."""
    shard, (unpacking, errors) = packed.shard, decoder
    try:
        with open_stream(packed.path) as file, _turn_of(file, target):
            packed_bytes = file.seek(0, os.SEEK_END)
            file.seek(0)
            if shard.packed_bytes not in (None, packed_bytes):
                raise _corrupt(packed, f"index.json says {shard.packed_bytes} bytes, and it has {packed_bytes}")
            if _is_there(target, shard):
                shown.add(shard.size_bytes)
                return
            with caches.written(target) as out:
                try:
                    _copy(unpacking(file, shard.size_bytes), out, packed, shown)
                except errors as error:
                    raise _corrupt(packed, f"its {shard.compression} is damaged ({error})") from error
                # The size alone shows that it is whole, so no name may come to storage before the
                # bytes do.
                out.flush()
                os.fsync(out.fileno())
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno is None:  # gzip's and bz2's own
            raise _corrupt(packed, f"its {shard.compression} is damaged ({error})") from error
        message = f"unpacking {packed.path} as {target} failed: {error.strerror}; unpacked= chooses another folder"
        raise IoError.caused_by(error, message, packed.path) from error


@contextlib.contextmanager
def _turn_of(file: BinaryIO, target: str) -> Iterator[None]:
    """Wait while another process unpacks the same shard: it is then found unpacked.

    Some network file systems know no locks: then all unpack it.
    """
    lock, name = file, ""
    with contextlib.ExitStack() as stack:
        if not isinstance(file, io.FileIO) and not isinstance(getattr(file, "raw", None), io.FileIO):
            name = f"{target}.lock"  # an object has no lock
            with contextlib.suppress(OSError):
                caches.make_folder(os.path.dirname(target))
                lock = stack.enter_context(open(name, "ab", opener=caches.lock_opener))
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _copy(stream: _Stream, out: BinaryIO, packed: _Packed, shown: Bar) -> None:
    """Copy all of ``stream``.

    Raises:
        CorruptData: it is longer or shorter than the shard should be, or has another hash.
    """
    shard, left_bytes = packed.shard, packed.shard.size_bytes
    algorithm, digest = _hash_of(shard) or ("", None)
    with contextlib.closing(stream):
        while data := stream.read(min(_STEP_BYTES, left_bytes + 1)):
            left_bytes -= len(data)
            if left_bytes < 0:
                raise _corrupt(packed, f"unpacked it has more than the {shard.size_bytes} bytes that index.json says")
            out.write(data)
            shown.add(len(data))
            if digest is not None:
                digest.update(data)
    if left_bytes:
        has_bytes = shard.size_bytes - left_bytes
        raise _corrupt(packed, f"unpacked it has {has_bytes} bytes, and index.json says {shard.size_bytes}")
    if digest is not None and digest.hexdigest() != shard.hashes[algorithm]:
        found, said = digest.hexdigest(), shard.hashes[algorithm]
        raise _corrupt(packed, f"unpacked its {algorithm} is {found[:16]}..., and index.json says {said[:16]}...")


def _hash_of(shard: Shard) -> tuple[str, _Digest] | None:
    """Return the first of a shard's hashes that can be computed: name and new digest."""
    for algorithm in sorted(shard.hashes):
        with contextlib.suppress(ValueError, TypeError):  # TypeError: half a surrogate pair is no name
            digest = hashlib.new(algorithm, usedforsecurity=False)
            if digest.digest_size:  # one of SHAKE has any
                return algorithm, digest
        if algorithm in _XXHASHES:
            with contextlib.suppress(ImportError):
                return algorithm, getattr(importlib.import_module("xxhash"), algorithm)()
    return None


def _corrupt(packed: _Packed, reason: str) -> CorruptData:
    size_bytes, _ = _stat_of(packed.path)
    return CorruptData(f"{packed.path}: {reason}; write the shard again", packed.path, 0, size_bytes)


def _sweep(targets: set[str]) -> None:
    """Remove unpacked files of older versions of shards, and of killed processes."""
    current = {target.rsplit(".", 2)[0] for target in targets}
    for folder in {os.path.dirname(target) for target in targets}:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                name, _, ending = entry.path.rpartition(f".{_ENDING}")
                is_earlier = not ending and entry.path not in targets
                is_left = ending.endswith(_TEMPORARY) and entry.stat().st_mtime < time.time() - _OLD_S
                if name.rsplit(".", 1)[0] in current and (is_earlier or is_left):
                    os.unlink(entry.path)
