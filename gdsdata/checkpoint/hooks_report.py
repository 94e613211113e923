"""`HooksReport`: the calls under `torch_hooks` that gdsdata served, and those that it left."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from gdsdata.fork_safe import fork_safe_lock

_MOST_REASONS = 200  # some have a file's contents in them; more are counted as one

_Key = tuple[str, str]  # the kind of call, and why torch did it


@dataclass(frozen=True)
class Served:
    """Calls of one kind that gdsdata served.

    Attributes:
        calls: how many.
        bytes: of the files that they wrote or read. The functions of `safetensors` count those of
            the tensors.
        seconds: that they took, added up. Calls of several threads overlap.
    """

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def plus(self, calls: int, size_bytes: int, seconds: float) -> Served:
        return Served(self.calls + calls, self.bytes + size_bytes, self.seconds + seconds)


@dataclass(frozen=True)
class LeftToTorch:
    """Calls of one kind that torch, or the package `safetensors`, did itself, for one reason.

    Attributes:
        call: as ``"torch.load"``.
        calls: how many.
        reason: why gdsdata did not serve them.
        example: what the newest of them was given: a path, or a type.
    """

    call: str
    calls: int
    reason: str
    example: str


@dataclass(frozen=True)
class HooksReport:
    """The calls of torch's checkpoint functions under `torch_hooks`.

        with gdsdata.torch_hooks() as hooks:
            torch.save(model.state_dict(), "model.pt")
        print(hooks.report())

    Attributes:
        served: the calls that gdsdata served, by kind: ``"torch.save"``, ``"torch.load"``,
            ``"dcp.save"`` (a rank's data), ``"dcp.load"``, and ``"dcp.async_save (process)"``,
            whose bytes are those of all ranks. With ``safetensors=True``, also
            ``"safetensors.save_file"``, ``"safetensors.load_file"`` and
            ``"safetensors.safe_open"``, with all that was read from the files that it opened.
        left_to_torch: the calls that torch did itself, or `safetensors` those of its functions.
    """

    served: Mapping[str, Served] = field(default_factory=dict)
    left_to_torch: tuple[LeftToTorch, ...] = ()

    def __str__(self) -> str:
        if not self.served and not self.left_to_torch:
            return "gdsdata: no call of torch.save, torch.load, torch.distributed.checkpoint or safetensors was seen"
        rows: list[tuple[str, ...]] = [("gdsdata served", "calls", "GB", "s", "GB/s")]
        for call, one in sorted(self.served.items()):
            rate = one.bytes / 1e9 / max(one.seconds, 1e-9)
            rows.append((call, str(one.calls), f"{one.bytes / 1e9:.3g}", f"{one.seconds:.3g}", f"{rate:.3g}"))
        lines = _table(rows, {1, 2, 3, 4}) if self.served else ["gdsdata served no call"]
        if self.left_to_torch:
            others = (
                "torch, safetensors" if any(_is_of_safetensors(one.call) for one in self.left_to_torch) else "torch"
            )
            rows = [(f"left to {others}", "calls", "because", "example")]
            rows += [(one.call, str(one.calls), one.reason, one.example) for one in self.left_to_torch]
            lines += ["", *_table(rows, {1})]
        return "\n".join(lines)


def _is_of_safetensors(call: str) -> bool:
    return call.startswith("safetensors.")


def _table(rows: list[tuple[str, ...]], numbers: set[int]) -> list[str]:
    """Return lines of columns. Those in ``numbers`` are aligned at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines


class Counts:
    """Counts calls since the process began. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock(threading.RLock)  # guards what follows
        self._served: dict[str, Served] = {}
        self._left: Counter[_Key] = Counter()
        self._examples: dict[_Key, str] = {}  # the newest of each
        self._within = threading.local()  # has `call`, a `_Call`, while this thread is in one

    def served(self, call: str, size_bytes: int, seconds: float, calls: int = 1) -> None:
        with self._lock:
            self._served[call] = self._served.get(call, Served()).plus(calls, size_bytes, seconds)

    def left(self, call: str, reason: str, example: object) -> None:
        """Count a call that torch does itself, unless it is a part of one that gdsdata serves.

        torch.distributed.checkpoint, for example, saves values that are no tensors into memory.
        """
        if getattr(self._within, "call", None) is not None:
            return
        with self._lock:
            if (call, reason) not in self._left and len(self._left) >= _MOST_REASONS:
                reason = "another reason"
            self._left[call, reason] += 1
            self._examples[call, reason] = str(example)

    @contextmanager
    def timed(self, call: str, calls: int = 1) -> Iterator[list[int]]:
        """Count a call that gdsdata serves, unless it raises, or is left to a package on the way.

        The caller appends its bytes to the list.

        Args:
            call: its kind.
            calls: 0 for what follows from a call that was counted.
        """
        sizes_bytes: list[int] = []
        begin_s = time.perf_counter()
        with self.watched(call) as current:
            yield sizes_bytes
        if not current.is_left:
            self.served(call, sum(sizes_bytes), time.perf_counter() - begin_s, calls)

    @contextmanager
    def watched(self, call: str) -> Iterator[_Call]:
        """Count a call if it is left to a package on the way: see `leave`."""
        outer = getattr(self._within, "call", None)
        self._within.call = current = _Call()
        try:
            yield current
        finally:
            self._within.call = outer
            if current.is_left:
                self.left(call, current.reason, current.example)

    def leave(self, reason: str, example: object) -> None:
        """Note that a package does the call itself that is `watched` on this thread."""
        current: _Call | None = getattr(self._within, "call", None)
        if current is not None:
            current.is_left, current.reason, current.example = True, reason, example

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(dict(self._served), self._left.copy(), dict(self._examples))


@dataclass
class _Call:
    """A call under way: whether and why a package does it."""

    is_left: bool = False
    reason: str = ""
    example: object = ""


class Snapshot(NamedTuple):
    """The counts at some moment. See `Counts`."""

    served: dict[str, Served]
    left: Counter[_Key]
    examples: dict[_Key, str]

    def since(self, begin: Snapshot) -> HooksReport:
        """Return the report of the calls after another snapshot."""
        served = {}
        for call, one in self.served.items():
            before = begin.served.get(call, Served())
            if one != before:
                served[call] = one.plus(-before.calls, -before.bytes, -before.seconds)
        left = tuple(
            LeftToTorch(call, count, reason, self.examples[call, reason])
            for (call, reason), count in sorted((self.left - begin.left).items())
        )
        return HooksReport(served, left)


COUNTS = Counts()
