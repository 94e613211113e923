"""Data sets that the bench makes once and keeps, and the folder that keeps them."""

import contextlib
import fcntl
import functools
import json
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import numpy as np

MAKER = 1  # Raise it when made data changes: older data sets are then made anew.
PIECE_BYTES = 16 * 2**20


class DataError(ValueError):
    """The data of a run is missing or damaged, or does not fit on the disk."""


def data_folder(settings):
    """Return the folder that `data.folder` (DataSettings) names, or the default one."""
    if settings.folder:
        return Path(settings.folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata" / "bench"


def make_folder(folder):
    """Make the folder of data unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = f"it cannot be made ({error.strerror})"
        raise DataError(f"{folder}: {why}: set data.folder= to a folder that you may write") from error


def write_synced(path, content):
    with open(path, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def sync(path):
    """Sync a file's bytes, or a folder's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def library_text():
    """Return the *.py files of Python's standard library, one after the other: uint8."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(path.parts)]
    text = b"".join(path.read_bytes() for path in sorted(files))
    if not text:
        raise DataError(f"no Python sources in {root} to make data from: give your own with data.path=")
    return np.frombuffer(text, np.uint8)


def tiled(text, start, count):
    """`count` bytes of the endlessly repeated text."""
    start %= len(text)
    if start + count <= len(text):
        return text[start : start + count]
    return np.tile(text, -(-(start + count) // len(text)))[start : start + count]


def write_tokens(target, size_bytes, files, progress):
    """Write one file, or a folder of `files` files that share the tokens equally."""
    text = library_text()
    if files > 1:
        target.mkdir()
    for index in range(files):
        begin, end = (size_bytes // 2 * place // files for place in (index, index + 1))
        with open(target / f"{index:06}.bin" if files > 1 else target, "wb") as out:
            for at in range(begin, end, PIECE_BYTES // 2):
                count = min(PIECE_BYTES // 2, end - at)
                out.write(tiled(text, at, count).astype("<u2"))
                progress(count * 2)


def write_volumes(target, size_bytes, shape, progress):
    text, elements = library_text(), int(np.prod(shape))
    target.mkdir()
    for index in range(max(1, size_bytes // (elements * 4))):
        values = tiled(text, index * elements, elements).astype(np.float32) / np.float32(255)
        np.save(target / f"{index:06}.npy", values.reshape(shape))
        progress(elements * 4)


def make(kind, folder, size_bytes, shape, progress=lambda count: None, files=1):
    """Return the path of the made tokens or npy files; `keep` says when they are made."""
    # The text has no part in this: the standard library may have its tests or not, which changes
    # nothing that is measured.
    parameters = {"kind": kind, "size_bytes": size_bytes, "shape": list(shape) if kind == "npy" else None}
    if kind == "tokens":
        name = f"tokens-uint16-{size_bytes}{f'-{files}-files' if files > 1 else '.bin'}"
        write = functools.partial(write_tokens, size_bytes=size_bytes, files=files, progress=progress)
        return keep(folder, name, parameters, size_bytes, write)
    name = f"npy-float32-{'x'.join(map(str, shape))}-{size_bytes}"
    return keep(folder, name, parameters, size_bytes, lambda target: write_volumes(target, size_bytes, shape, progress))


def keep(folder, name, parameters, size_bytes, write):
    """Return the path of what `write(path)` makes, now unless it is complete.

    If another run makes data in the folder, this waits for it.
    """
    make_folder(folder)
    target, manifest_path = folder / name, folder / f"{name}.json"
    parameters = {"maker": MAKER, **parameters}
    if not complete(target, manifest_path, parameters):
        with turn_in(folder):
            if not complete(target, manifest_path, parameters):
                make_anew(target, manifest_path, parameters, size_bytes, write)
    return target


@contextlib.contextmanager
def turn_in(folder):
    """Wait while another run makes data in the folder. Some network file systems know no locks."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def make_anew(target, manifest_path, parameters, size_bytes, write):
    """Write the data under a temporary name, sync and rename it.

    Its manifest (`<name>.json`) comes last, so a data set without a manifest was interrupted, and
    is made again.
    """
    folder, name = target.parent, target.name
    for stale in folder.glob(f"{name}.tmp-*"):
        if not alive(stale.name.rpartition("-")[2]):
            remove(stale)
    need_space(folder, f"the {parameters['kind']} data set", size_bytes, "data.size_bytes=")
    temporary = folder / f"{name}.tmp-{os.getpid()}"
    try:
        write(temporary)
        os.sync()  # Many files are synced sooner all at once.
        if target.exists():
            manifest_path.unlink(missing_ok=True)
            remove(target)
        os.rename(temporary, target)
    finally:
        remove(temporary)
    files, size = counted(target)
    made_by = f"gdsdata.bench.data, version {MAKER}"
    manifest = {"parameters": parameters, "files": files, "bytes": size, "made_by": made_by}
    written = folder / f"{name}.json.tmp-{os.getpid()}"
    write_synced(written, json.dumps(manifest | {"python": sys.version.split()[0]}, indent=2).encode())
    os.rename(written, manifest_path)


def complete(target, manifest_path, parameters):
    try:
        manifest = json.loads(manifest_path.read_text())
        return manifest.get("parameters") == parameters and counted(target) == (manifest["files"], manifest["bytes"])
    except (OSError, ValueError):
        return False


def counted(target):
    """Return (files, their bytes) of a file or a folder."""
    files = sorted(target.glob("*")) if target.is_dir() else [target]
    return len(files), sum(file.stat().st_size for file in files)


def need_space(folder, what, size_bytes, setting):
    """Raise DataError if the disk has less than `size_bytes` and 64 MiB to spare."""
    free, needed = shutil.disk_usage(folder).free, size_bytes + 64 * 2**20
    if free < needed:
        raise DataError(
            f"{folder} has {free / 2**20:,.0f} MiB free and {what} needs {needed / 2**20:,.0f}: set data.folder= to a "
            f"larger disk, or {setting} to less"
        )


def alive(pid):
    return os.path.exists(f"/proc/{pid}")


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
