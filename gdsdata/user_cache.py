"""The user's folder of cached files."""

from __future__ import annotations

import errno
import os


class NoHomeFolder(FileNotFoundError):
    """The user has no home folder, as in a container whose /etc/passwd lacks the user."""


def user_cache() -> str:
    """Return the folder that ``XDG_CACHE_HOME`` names, if its path is absolute; else ``~/.cache``.

    Raises:
        NoHomeFolder: see there.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    folder = named if os.path.isabs(named) else os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(folder):
        raise NoHomeFolder(
            errno.ENOENT, f"user {os.geteuid()} has no home folder: set HOME or XDG_CACHE_HOME to an absolute path"
        )
    return folder
