"""The folder of the sockets: one user's alone, and checked before each use.

It is ``$XDG_RUNTIME_DIR/gdsdata``, or ``/tmp/gdsdata-UID`` where there is no such variable. The
reader looks at both, because a program that was started by a scheduler may lack the variable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

ENDING = ".sock"


def writing() -> str:
    """Return the folder in which this process puts its socket."""
    return places()[0]


def places() -> list[str]:
    """Return the folders that sockets of this user may be in, this process's own first."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [f"{runtime}/gdsdata"] if os.path.isabs(runtime) and os.path.isdir(runtime) else []
    return [*found, f"/tmp/gdsdata-{os.geteuid()}"]


@contextlib.contextmanager
def opened(path: str, make: bool = False) -> Iterator[int]:
    """Open the folder, for ``with``.

    Names in it are used by way of the descriptor, so nobody can exchange it after the check.

    Args:
        path: of the folder.
        make: make it if it is not there.

    Raises:
        FileNotFoundError: it is not there.
        PermissionError: it belongs to another user, others may enter it, or it is no folder.
        OSError: it cannot be made.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise PermissionError(error.errno, f"'{path}' is no folder: remove it") from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"'{path}' belongs to user {found.st_uid}: set XDG_RUNTIME_DIR")
        if stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(errno.EPERM, f"others may enter '{path}': run chmod 700 on it")
        yield descriptor
    finally:
        os.close(descriptor)


def address(descriptor: int, name: str) -> str:
    """Return a socket's path by way of the folder's descriptor. It is short, as sockets demand."""
    return f"/proc/self/fd/{descriptor}/{name}"


def process_of(name: str) -> int | None:
    """Return the process that a socket is named after; None: it is no socket of gdsdata."""
    number, dash, _ = name.removesuffix(ENDING).partition("-")
    return int(number) if name.endswith(ENDING) and dash and number.isdecimal() else None
