"""`Manifest`: names the files of a complete checkpoint, in a folder or below a URL.

    step-100/rank-0-5f2c91d0.pt     what rank 0 saved; torch.load reads it
    step-100/manifest.json          written last: names the files of every rank

Without its manifest there is no checkpoint.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import NamedTuple

from gdsdata.errors import CorruptData

MANIFEST = "manifest.json"
RANK_FILE = r"rank-[0-9]+-[0-9a-f]{8}\.pt"
_FORMAT = 1
# A file of a rank has some 80 bytes of it.
LONGEST_BYTES = 2**26
_MOST_DIGITS = 19  # of a step, as time.time_ns() has
LARGEST_STEP = 10**_MOST_DIGITS - 1
_STEP_FOLDER = re.compile(r"step-(0|[1-9][0-9]*)")
_RANK_FILE = re.compile(RANK_FILE)


@dataclass(frozen=True)
class SavedFile:
    """The file that one rank saved.

    Attributes:
        name: in the step's folder.
        size_bytes: its size.
    """

    name: str
    size_bytes: int


@dataclass(frozen=True)
class Manifest:
    """A complete checkpoint.

    Attributes:
        step: the step.
        sequence: rises with each checkpoint that is committed: the newest one has the highest.
        files: those of the ranks, in order.
    """

    step: int
    sequence: int
    files: tuple[SavedFile, ...]

    @property
    def content(self) -> bytes:
        """The bytes of the manifest's file."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()


class Kept(NamedTuple):
    """Which checkpoints stay in a folder, or in a store, when there are newer ones.

    Attributes:
        last: how many of the newest ones.
        every: those of steps that are multiples of it too; None: no others.
    """

    last: int
    every: int | None = None

    def for_ever(self, step: int) -> bool:
        """Return whether the checkpoint of a step stays however many newer ones there are."""
        return self.every is not None and step % self.every == 0


def folder_of_step(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step}"


def step_of_folder(name: str) -> int | None:
    """Return the step whose folder has a name; None if it is another folder."""
    found = _STEP_FOLDER.fullmatch(name)
    return int(found[1]) if found and len(found[1]) <= _MOST_DIGITS else None


def is_rank_file(name: str) -> bool:
    """Return whether a name is that of a rank's file."""
    return _RANK_FILE.fullmatch(name) is not None


def parsed_manifest(content: bytes, step: int, path: str) -> Manifest:
    """Return what a manifest says.

    Args:
        content: of its file.
        step: the step whose folder it is in.
        path: of the file, or its URL.

    Raises:
        CorruptData: it is damaged.
    """
    try:
        if len(content) > LONGEST_BYTES:
            raise ValueError(f"it has more than {LONGEST_BYTES} bytes")
        found = json.loads(content)
        if found["format"] != _FORMAT:
            raise ValueError(f"it is of format {found['format']!r}, and this version knows {_FORMAT}")
        files = tuple(SavedFile(str(one["name"]), _count(one["size_bytes"])) for one in found["files"])
        if not all(is_rank_file(one.name) for one in files):
            raise ValueError("it names files that are none of a checkpoint's")
        if found["step"] != step:
            its_folder = folder_of_step(_count(found["step"]))
            raise ValueError(f"it is of step {found['step']}: rename its folder to {its_folder!r}")
        return Manifest(step, _count(found["sequence"]), files)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"'{path}' is no manifest: {error!r}; remove its folder to go on without it"
        raise CorruptData(message, path) from error


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.50} is no number of bytes, and no sequence")
    return value
