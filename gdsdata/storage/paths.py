"""The paths of many files, in memory that processes can share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np


def absolute(path: str | os.PathLike[str]) -> str:
    """Return what `os.path.abspath` does, but ".." behind a link is what it is to the system.

    It is the folder above the one that the link leads to.

    Raises:
        FileNotFoundError: the path is relative, and the working directory was deleted.
    """
    try:
        normal, parts = os.path.abspath(path), os.fspath(path).split(os.sep)
    except FileNotFoundError as error:
        reason = "the working directory was deleted: change into another one, or give an absolute path"
        raise FileNotFoundError(error.errno, reason, os.fsdecode(path)) from error
    if os.pardir not in parts or os.path.realpath(normal) == os.path.realpath(path):
        return normal
    behind = len(parts) - parts[::-1].index(os.pardir)
    return os.path.normpath(os.path.join(os.path.realpath(os.sep.join(parts[:behind])), *parts[behind:]))


def absolutes(paths: Sequence[str]) -> list[str]:
    """Return what `absolute` does, of many paths, faster if all of them are that already."""
    text = "\0".join(paths)
    are_normal = (
        f"\0{text}".count("\0/") == text.count("\0") + 1 and _are_normal(text) and set(map(type, paths)) == {str}
    )
    return list(paths) if are_normal else [absolute(path) for path in paths]


def _are_normal(text: str) -> bool:
    """Return whether no part of joined paths is empty, "." or ".."."""
    letters = np.frombuffer(f"{text}\0\0\0".encode(errors="surrogatepass"), np.uint8)
    places = np.flatnonzero(letters == ord("/"))
    for _ in range(3):  # behind a slash, then behind its dot, then behind two dots
        places += 1
        behind = letters[places]
        if ((behind == ord("/")) | (behind == 0)).any():
            return False
        places = places[behind == ord(".")]
    return True


def contain(paths: Sequence[str], part: str) -> bool:
    """Return whether a path contains ``part``, which has no NUL. One search in all is faster."""
    if isinstance(paths, JoinedPaths):
        return os.fsencode(part) in paths.joined.tobytes()
    return part in "\0".join(paths)


def joined(paths: Sequence[str]) -> np.ndarray:
    """Return the bytes of paths, with a NUL between each two: uint8, one dimension.

    Raises:
        ValueError: a path contains a NUL.
    """
    if isinstance(paths, JoinedPaths):
        return paths.joined
    text = "\0".join(paths)
    if text.count("\0") >= max(1, len(paths)):
        path = next(path for path in paths if "\0" in path)
        raise ValueError(f"{path!r} contains a NUL, and no path may: give the file's name without it")
    return np.frombuffer(os.fsencode(text), np.uint8)


def chosen(paths: Sequence[str], places: np.ndarray) -> Sequence[str]:
    """Return the paths at some places, 0 or more each."""
    return paths.at(places) if isinstance(paths, JoinedPaths) else [paths[place] for place in places.tolist()]


def ends_of(joined_paths: np.ndarray) -> np.ndarray:
    """Return where each of joined paths ends, at least one: int64, one for each path."""
    return np.append(np.flatnonzero(joined_paths == 0), len(joined_paths))


class JoinedPaths(Sequence[str]):
    """Paths that become strings when they are asked for.

    A million strings take a hundred megabytes in each process; mapped bytes take none. A slice is a
    list, and so is a pickle.

    Args:
        joined_paths: as `joined` returns them.
        ends: as `ends_of` returns them.
    """

    def __init__(self, joined_paths: np.ndarray, ends: np.ndarray) -> None:
        self.joined, self._ends = joined_paths, ends

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> str: ...

    @overload
    def __getitem__(self, place: slice) -> list[str]: ...

    def __getitem__(self, place: int | slice) -> str | list[str]:
        if isinstance(place, slice):
            begin, stop, step = place.indices(len(self))
            if step == 1 and begin < stop:
                return self._text(self._begin(begin), self._ends[stop - 1]).split("\0")
            return [self[i] for i in range(begin, stop, step)]
        if not -len(self) <= place < len(self):
            raise IndexError(f"path {place} of {len(self)}")
        place %= len(self)
        return self._text(self._begin(place), self._ends[place])

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])

    def at(self, places: np.ndarray) -> JoinedPaths:
        """Return the paths at some places, 0 or more each, without making strings."""
        before = np.where(places > 0, self._ends[places - 1] + 1, 0)  # where each begins
        sizes = self._ends[places] - before + 1  # with a NUL behind each
        ends = np.cumsum(sizes) - 1
        sources = np.arange(int(sizes.sum()) - 1) + np.repeat(before - ends - 1 + sizes, sizes)[:-1]
        chosen = self.joined.take(sources, mode="clip")  # the last path has no NUL
        chosen[ends[:-1]] = 0
        return JoinedPaths(chosen, ends)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(str.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # like a list's

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self[:],)

    def _begin(self, place: int) -> int:
        return int(self._ends[place - 1]) + 1 if place else 0

    def _text(self, begin: int, end: int) -> str:
        return os.fsdecode(self.joined[begin:end].tobytes())
