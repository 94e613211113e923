"""Errors and arguments of several ranks: on their way to the others, and in words."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence

from gdsdata.errors import IoError

_MOST_BYTES = 1 << 20  # of a pickled error


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


def first_error(errors: Sequence[Exception | None]) -> tuple[int, str]:
    """Choose the error that all ranks raise.

    Returns:
        The first rank that has one, and a note that says which ranks have it, or have others; "" if
        all ranks have the same.
    """
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    chosen = errors[failed[0]]
    same = [rank for rank in failed if (type(errors[rank]), str(errors[rank])) == (type(chosen), str(chosen))]
    if len(same) == len(errors):
        return failed[0], ""
    note = f"on {ranks_in_words(same)} of {len(errors)} that read together"
    others = [rank for rank in failed if rank not in same]
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
