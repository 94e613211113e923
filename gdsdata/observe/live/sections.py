"""A view as tables of words, for a terminal and for pipes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gdsdata.observe.live import words

_REMEDY = "Start the training with GDSDATA_TOP=1 in its environment; a process is seen from its first engine on."


class Section(NamedTuple):
    """A table.

    Attributes:
        title: of the table.
        columns: their titles.
        rows: the cells.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    @property
    def is_left(self) -> tuple[bool, ...]:
        """Which columns hold words, which begin at the left."""
        return tuple(i == 0 or title in _WORDS for i, title in enumerate(self.columns))


_WORDS = {"rank", "program", "first file", "folder", "reason", "in the epoch", "ring"}


def sections(view: Mapping[str, Any]) -> Iterator[Section]:
    """Yield the tables of a view. Those without a row are left out."""
    named = [(f"{one['pid']}", one) for one in view["processes"]]
    data_sets = [_data_set(pid, one) for pid, process in named for one in process["data_sets"]]
    saves = [_save(pid, one) for pid, process in named for one in process["saves"]]
    ranges = [_ranges(pid, one["network"]) for pid, one in named if one["network"]]
    stores = [_stores(pid, one["stores"]) for pid, one in named if one["stores"]]
    silent = [(f"{one['pid']}", one["reason"]) for one in view["silent"]]
    tables = (
        Section("Processes", _PROCESS, _processes(view)),
        Section("Read and written", ("route", "speed", "in all"), _routes(view["sum"]["routes"])),
        Section("Data sets", _DATA_SET, data_sets),
        Section("Workers", _WORKERS, [_workers(pid, one["workers"]) for pid, one in named if one["workers"]["count"]]),
        Section("Saves in the background", _SAVE, saves),
        Section("Cache of objects", _CACHE, [_cache(pid, one["cache"]) for pid, one in named if one["cache"]]),
        Section("Ranges of objects", _RANGES, ranges),
        Section("Other requests to stores", _STORES, stores),
        Section("Without an answer", ("pid", "reason"), silent),
    )
    return (table for table in tables if table.rows)


_PROCESS = ("pid", "rank", "program", "moves", "batches", "waits for input", "waits for saves", "running")
_DATA_SET = ("pid", "first file", "in the epoch", "speed", "batches", "ring", "waiting")
_WORKERS = ("pid", "workers", "active", "storage", "link", "disk", "requests", "errors")
_SAVE = ("pid", "folder", "last step", "complete", "failed", "staged", "written", "writing", "uploaded", "uploading")
_CACHE = ("pid", "folder", "size", "bound", "hits", "from it", "into it", "evicted", "damaged")
_RANGES = ("pid", "requests", "a second", "bytes", "speed", "retries", "throttled", "hedges", "connections")
_STORES = ("pid", "requests", "a second", "retries", "sent", "received")


def _processes(view: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = [(f"{one['pid']}", words.name_of(one), one["program"], *_shown(one)) for one in view["processes"]]
    rows = [(*row, words.duration(one["age_s"])) for row, one in zip(rows, view["processes"], strict=True)]
    return rows if len(rows) < 2 else [*rows, ("sum", f"{len(rows)} processes", "", *_shown(view["sum"]), "")]


def _shown(one: Mapping[str, Any]) -> tuple[str, ...]:
    shares = words.share(one["input_share"]), words.share(one["checkpoint_share"])
    return words.speed(words.total(one["routes"])), words.rate(one["batches_per_s"]), *shares


def _routes(read: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [(name, words.speed(bytes_per_s), words.size(count)) for name, count, bytes_per_s in words.routes(read)]


def _data_set(pid: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    speeds = words.speed(one["bytes_per_s"]), words.rate(one["batches_per_s"])
    return pid, words.source(one), words.place(one), *speeds, words.ring(one), words.share(one["stall_share"])


def _workers(pid: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    shares = (words.share(one[what]) for what in ("active", "storage", "link"))
    disk = words.speed(one["storage_bytes_per_s"]), words.rate(one["requests_per_s"])
    return pid, f"{one['count']}", *shares, *disk, f"{one['errors']}"


def _save(pid: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    def so_far(name: str) -> str:
        return f"{words.size(one[name])} of {words.size(one['begun_bytes'])}"

    step = words.UNKNOWN if one["step"] is None else f"{one['step']:,}"
    uploads = (words.UNKNOWN, words.UNKNOWN)
    if one["upload"] is not None:
        uploads = words.size(one["uploaded_bytes"]), words.speed(one["uploaded_bytes_per_s"])
    counts = f"{one['complete']}", f"{one['failed']}"
    written = so_far("written_bytes"), words.speed(one["written_bytes_per_s"])
    return pid, one["folder"], step, *counts, so_far("staged_bytes"), *written, *uploads


def _cache(pid: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    bound = words.size(one["most_bytes"]) if one["most_bytes"] else words.UNKNOWN
    speeds = words.speed(one["hit_bytes_per_s"]), words.speed(one["filled_bytes_per_s"])
    shares = words.share(one["hit_share"]), *speeds, words.size(one["evicted_bytes"]), f"{one['damaged_blocks']}"
    return pid, one["folder"], words.size(one["used_bytes"]), bound, *shares


def _ranges(pid: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    speeds = words.rate(one["requests_per_s"]), words.size(one["bytes"]), words.speed(one["bytes_per_s"])
    counts = (f"{one[name]:,}" for name in ("retries", "throttled", "hedges", "connections"))
    return pid, f"{one['requests']:,}", *speeds, *counts


def _stores(pid: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    sizes = words.size(one["sent_bytes"]), words.size(one["received_bytes"])
    return pid, f"{one['requests']:,}", words.rate(one["requests_per_s"]), f"{one['retries']:,}", *sizes


def nobody(view: Mapping[str, Any]) -> str:
    """Return what a view without tables means."""
    pid = view.get("only_pid")
    if pid is None:
        return f"No process of this user exports its numbers. {_REMEDY}"
    return f"Process {pid} exports no numbers to this user. {_REMEDY}"


def plain(view: Mapping[str, Any]) -> str:
    """Return a view as lines of text, for a pipe."""
    lines = []
    for section in sections(view):
        cells = [section.columns, *section.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned: list[Callable[[str, int], str]] = [str.ljust if left else str.rjust for left in section.is_left]
        lines.append(section.title)
        for row in cells:
            parts = (align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True))
            lines.append(f"  {'  '.join(parts)}".rstrip())
        lines.append("")
    return "\n".join(lines) if lines else nobody(view) + "\n"
