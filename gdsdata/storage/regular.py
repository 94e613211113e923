"""`regular`: an opener of files, which refuses pipes at once and does not wait for a writer.

Folders of data and checkpoints come from others: an archive may have pipes among its files.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer  # collections.abc has it from Python 3.12 on

REFUSED = "it is a pipe or a device, and no file: remove it, or fetch the folder again"


def open_without_waiting(path: str | os.PathLike[str], flags: int = os.O_RDONLY | os.O_CLOEXEC) -> int:
    """Open a file to read it, and return its descriptor.

    A pipe is opened too: its reads by offset fail (ESPIPE). `regular` also looks what it is.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        return os.open(path, flags | os.O_NONBLOCK)
    except BlockingIOError:  # another process has a lease on it: fcntl(2)
        return os.open(path, flags)


def read_at(descriptor: int, length: int, offset: int) -> bytes:
    """Return ``length`` bytes of a file from ``offset`` on; fewer if the file ends.

    One `os.pread` may return fewer before that, as of a network or FUSE file system.

    Raises:
        OSError: the storage refuses a read.
    """
    data = part = os.pread(descriptor, length, offset)
    while part and len(data) < length:
        part = os.pread(descriptor, length - len(data), offset + len(data))
        data += part
    return data


def read_resident(descriptor: int, into: Buffer, offset: int) -> int:
    """Read bytes of a file that the page cache has, and return how many there were.

    Raises:
        BlockingIOError: the page cache lacks the first of them.
        OSError: the storage refuses the read. EOPNOTSUPP: nothing says what the page cache has. A
            Python that was built with headers of an old C library has no such call.
    """
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        raise OSError(errno.EOPNOTSUPP, "this Python has no RWF_NOWAIT")
    return os.preadv(descriptor, [into], offset, flag)


def regular(path: str, flags: int) -> int:
    """Open a file to read it: an ``opener`` of Python's `open`.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device.
    """
    descriptor = open_without_waiting(path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISBLK(mode) or stat.S_ISDIR(mode):  # of a folder, Python raises its own error
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, REFUSED, path)
