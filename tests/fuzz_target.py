"""`Target`: what `fuzz.py` tests."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from gdsdata.errors import IoError

Files = dict[str, bytes]  # by name, all of one folder
# The same for every file of every input, because indexes contain it.
MTIME_NS = 1_700_000_000_000_000_000


def unchanged(files: Files) -> Files:
    return files


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        name: on the command line.
        modules: whose lines are counted.
        seeds: each writes a sound input into a folder.
        read: parses a folder's files and checks the result; raises what the parser raises.
        mend: repairs the checksums and lengths of a changed input, so that a parser reads on.
        tokens: bytes that mean something to the parser.
        refusals: allowed besides `CorruptData`, `IoError`, `FileNotFoundError` and `ValueError`.
        named: one of these is in each refusal; none: the input's folder is.
    """

    name: str
    modules: Sequence[ModuleType]
    seeds: Sequence[Callable[[Path], object]]
    read: Callable[[Path], object]
    mend: Callable[[Files], Files] = unchanged
    tokens: Sequence[bytes] = ()
    refusals: tuple[type[BaseException], ...] = ()
    named: tuple[str, ...] = ()


def each(readings: Iterable[Callable[[], object]]) -> None:
    """Call all of them, and then raise the first refusal."""
    refusal = None
    for reading in readings:
        try:
            reading()
        except (ValueError, IoError, FileNotFoundError, PermissionError) as error:
            refusal = refusal or error
    if refusal is not None:
        raise refusal
