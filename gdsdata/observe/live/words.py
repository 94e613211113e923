"""Numbers of a view as words for people. A dash stands for a number that is not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNKNOWN = "–"
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
ROUTES = {  # in the order in which they are shown
    "page_cache": "page cache",
    "pinned_page_cache": "pinned page cache",
    "direct": "disk, O_DIRECT",
    "buffered": "disk, buffered",
    "gds": "disk to GPU",
    "gds_compat": "disk to GPU, by the host",
    "local_cache": "local cache",
    "cache_fill": "server, into the cache",
    "remote": "server",
}


def size(count: float | None) -> str:
    """Return bytes as "1.23 GB"."""
    if count is None:
        return UNKNOWN
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 999.5 * unit else f"{count / unit:.0f} {name}"
    return f"{count:.0f} B"


def speed(count: float | None) -> str:
    """Return bytes per second."""
    return UNKNOWN if count is None else f"{size(count)}/s"


def rate(count: float | None) -> str:
    """Return a count per second."""
    return UNKNOWN if count is None else f"{count:.1f}/s" if count < 100 else f"{count:,.0f}/s"


def share(part: float | None) -> str:
    """Return a share as a percentage."""
    return UNKNOWN if part is None else f"{part:.0%}" if part >= 0.1 or not part else f"{part:.1%}"


def duration(seconds: float) -> str:
    """Return a time as "2 h 05 min"."""
    minutes, left = divmod(int(seconds), 60)
    if not minutes:
        return f"{left} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {left:02} s"


def name_of(process: Mapping[str, Any]) -> str:
    """Return "3 of 8, loader worker 1", as far as it is known."""
    parts = [] if process["rank"] is None else [f"{process['rank']} of {process['world_size'] or '?'}"]
    if process["loader_worker"] is not None:
        parts.append(f"loader worker {process['loader_worker']}")
    return ", ".join(parts) or UNKNOWN


def routes(read: Mapping[str, Mapping[str, float | None]]) -> list[tuple[str, float | None, float | None]]:
    """Return name, bytes and bytes per second of each route that served any."""
    known = [(said, read[route]) for route, said in ROUTES.items() if route in read]
    known += [(route, read[route]) for route in read if route not in ROUTES]
    return [(said, counts["bytes"], counts["bytes_per_s"]) for said, counts in known]


def total(read: Mapping[str, Mapping[str, float | None]]) -> float | None:
    """Return the bytes per second of all routes; None: they are not known yet."""
    found = [counts["bytes_per_s"] for counts in read.values()]
    return sum(one for one in found if one is not None) if any(one is not None for one in found) else None


def source(one: Mapping[str, Any]) -> str:
    """Return the name of a data set: the last parts of its first file's path, and how many more."""
    name = "/".join(one["source"].rsplit("/", 2)[-2:])
    return name if one["files"] == 1 else f"{name} and {one['files'] - 1:,} more"


def place(one: Mapping[str, Any]) -> str:
    """Return where a data set is in its epoch."""
    return f"epoch {one['epoch']}, batch {one['epoch_batch']:,} of {one['epoch_batches']:,}"


def ring(one: Mapping[str, Any]) -> str:
    """Return the state of a data set's ring."""
    at = one["ring"]
    mean = "" if one["mean_ready"] is None else f" (mean {one['mean_ready']:.1f})"
    return f"{at['ready']} ready{mean}, {at['filling']} filling, of {at['slots']}"
