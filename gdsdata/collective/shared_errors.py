"""Errors and arguments of several ranks: on their way to the others, and in words.

An exchange is a function that takes the bytes of this rank and returns those of all ranks, in
order, and that all of them call.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from gdsdata.errors import IoError

_MOST_BYTES = 1 << 20  # of a pickled error


def contents_of_all(mine: bytes, gather: Callable[[torch.Tensor], torch.Tensor]) -> list[bytes]:
    """Exchange bytes.

    Args:
        mine: of this rank; others may have more or fewer.
        gather: takes a tensor of this rank, and returns those of all, which have equal sizes.
    """
    sizes = gather(torch.tensor([len(mine)]))[:, 0].tolist()
    padded = torch.from_numpy(np.frombuffer(mine.ljust(max(sizes), b"\0"), np.uint8).copy())
    return [row[:size].numpy().tobytes() for row, size in zip(gather(padded), sizes, strict=True)]


def error_of_all(
    mine: Exception | None, exchange: Callable[[bytes], list[bytes]], ranks: Sequence[int], place: int, together: str
) -> Exception:
    """Exchange errors, of which there is at least one, and return the one that all ranks raise.

    Args:
        mine: of this rank, if it has one.
        exchange: of bytes.
        ranks: that take part, as a note calls them.
        place: of this rank in ``ranks``.
        together: all of them, in words.

    Returns:
        The error of the first rank that has one, with a note of which ranks have it. It is ``mine``
        itself, with its traceback, if this is that rank.
    """
    errors = [unpacked(content) for content in exchange(packed(mine))]
    chosen, note = first_error(errors, ranks, together)
    error = mine if chosen == place else errors[chosen]
    assert error is not None
    if note and hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(note)
    return error


def packed(error: Exception | None) -> bytes:
    """Pickle an error; b"" if there is none.

    If it cannot be pickled, it becomes an `IoError` or a RuntimeError with its text.
    """
    if error is None:
        return b""
    try:
        content = pickle.dumps(error)
        again = pickle.loads(content)
        if type(again) is type(error) and str(again) == str(error) and len(content) <= _MOST_BYTES:
            return content
    except Exception:
        pass
    text = f"{type(error).__name__}: {error}"[: _MOST_BYTES // 8]
    plain: Exception = RuntimeError(text)
    if isinstance(error, OSError):
        plain = IoError.caused_by(error, text, str(error.filename or ""))
    return pickle.dumps(plain)


def unpacked(content: bytes) -> Exception | None:
    """Return the error that another rank packed."""
    if not content:
        return None
    try:
        found = pickle.loads(content)
    except Exception as error:  # its class is not importable here
        return RuntimeError(f"another rank's error cannot be unpickled here: {error}")
    return found if isinstance(found, Exception) else RuntimeError(repr(found))


def first_error(errors: Sequence[Exception | None], ranks: Sequence[int], together: str) -> tuple[int, str]:
    """Choose the error that all ranks raise.

    Args:
        errors: of each rank.
        ranks, together: as of `error_of_all`.

    Returns:
        The place of the first rank that has one, and a note that says which ranks have it, or have
        others; "" if all ranks have the same.
    """
    failed = [place for place, error in enumerate(errors) if error is not None]
    chosen = errors[failed[0]]
    same = [place for place in failed if (type(errors[place]), str(errors[place])) == (type(chosen), str(chosen))]
    if len(same) == len(errors):
        return failed[0], ""
    note = f"on {ranks_in_words([ranks[place] for place in same])} of {together}"
    others = [ranks[place] for place in failed if place not in same]
    return failed[0], f"{note}; {ranks_in_words(others)} failed otherwise" if others else note


def words_of_values(calls: Sequence[Mapping[str, object]]) -> str:
    """Return what differs between the ranks: "verify=True on rank 0, False on ranks 1, 2"."""
    words = []
    for name in dict.fromkeys(name for call in calls for name in call):
        ranks: dict[str, list[int]] = {}
        for rank, call in enumerate(calls):
            ranks.setdefault(repr(call[name]) if name in call else "nothing", []).append(rank)
        if len(ranks) > 1:
            said = ", ".join(f"{value} on {ranks_in_words(those)}" for value, those in ranks.items())
            words.append(f"{name}={said}")
    return "; ".join(words)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 3", or "ranks 0, 1, 5-7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    said = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {said}"
