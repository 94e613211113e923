"""Rates and sums: what people read, from two snapshots of each process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gdsdata.observe.counted import minus
from gdsdata.observe.live.client import Answers

View = dict[str, Any]
_Key = tuple[str, int, float]  # host, process id, start: a number may be of two processes in turn
_WORKER_TIMES = ("active", "storage", "link", "device")
_SAVE_BYTES = ("begun_bytes", "staged_bytes", "written_bytes", "uploaded_bytes")
_CACHE = ("used_bytes", "most_bytes", "filled_bytes", "evicted_bytes", "damaged_blocks", "refused_blocks")
_NETWORK = ("requests", "retries", "throttled", "hedges", "bytes", "connections")
_STORES = ("requests", "retries", "sent_bytes", "received_bytes")


class Sampler:
    """Asks processes, and keeps their last snapshots for the next rates. Any thread may call it.

    Args:
        ask: returns the snapshots of now.
        least_s: a view that is younger than this is returned again, so many readers cost no more
            than one.
        only_pid: of the only process that is asked; None: all are. Views have it too.
    """

    def __init__(self, ask: Callable[[], Answers], least_s: float = 0.5, only_pid: int | None = None) -> None:
        self._ask, self._least_s, self._only_pid = ask, least_s, only_pid
        self._lock = threading.Lock()  # guards everything below
        self._before: dict[_Key, dict[str, Any]] = {}
        self._answers = Answers([], [])
        self._view: View | None = None
        self._taken = 0.0

    def view(self) -> View:
        """Return the view of now: see `view_of`."""
        return self._newest()[0]

    def answers(self) -> Answers:
        """Return the snapshots of now."""
        return self._newest()[1]

    def _newest(self) -> tuple[View, Answers]:
        with self._lock:
            now = time.monotonic()
            if self._view is None or now - self._taken >= self._least_s:
                self._answers = self._ask()
                self._view = {**view_of(self._answers, self._before), "only_pid": self._only_pid}
                self._before = {key_of(one): one for one in self._answers.snapshots}
                self._taken = now
            return self._view, self._answers


def key_of(snapshot: Mapping[str, Any]) -> _Key:
    """Return what tells a process from all others."""
    return str(snapshot["host"]), int(snapshot["pid"]), float(snapshot["started_s"])


def view_of(answers: Answers, before: Mapping[_Key, Mapping[str, Any]]) -> View:
    """Return what people read of all processes.

    Args:
        answers: the snapshots of now.
        before: earlier ones of the same processes. A process without one has no rates: they are
            None.

    Returns:
        time_s, the list "processes", the list "silent", and "sum" of all processes.
    """
    processes = [_process(one, before.get(key_of(one))) for one in answers.snapshots]
    return {
        "time_s": time.time(),
        "processes": processes,
        "silent": [one._asdict() for one in answers.silent],
        "sum": _sum(processes),
    }


def _process(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> View:
    seconds = 0.0 if before is None else now["clock_s"] - before["clock_s"]
    rate = _Rates(now, before if seconds > 0 else None, seconds)
    names = ("pid", "parent_pid", "host", "program", "rank", "world_size", "loader_worker", "gdsdata")
    return {
        **{name: now[name] for name in names},
        "age_s": now["time_s"] - now["started_s"],
        "routes": rate.routes(),
        "batches_per_s": rate.sum_of("data_sets", "batches"),
        "input_share": rate.share("input_s", "input_s", "training_s"),
        "checkpoint_share": rate.share("checkpoint_s", "input_s", "training_s"),
        "data_sets": [_data_set(one, rate) for one in now["data_sets"]],
        "workers": _workers(now["engines"], rate),
        "saves": _saves(now["saves"], rate),
        "cache": _cache(now, rate),
        "network": _requests(now.get("network"), _NETWORK, rate, "network"),
        "stores": _requests(now.get("stores"), _STORES, rate, "stores"),
    }


class _Rates:
    """How fast a process's counters rise."""

    def __init__(self, now: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> None:
        self._now, self._before, self._seconds = now, before, seconds

    @property
    def is_known(self) -> bool:
        return self._before is not None

    def risen(self, kind: str) -> dict[int, dict[str, Any]]:
        """Return how much the counters of each object of a kind have risen, by its id.

        An object that is new has risen from 0.
        """
        if self._before is None:
            return {}
        earlier = {one["id"]: _counters(one) for one in self._before[kind]}
        return {one["id"]: minus(_counters(one), earlier.get(one["id"], {})) for one in self._now[kind]}

    def per_s(self, count: float) -> float:
        return count / self._seconds

    def sum_of(self, kind: str, name: str) -> float | None:
        """Return the rate of a counter of all objects of a kind, per second."""
        return self.per_s(sum(one[name] for one in self.risen(kind).values())) if self.is_known else None

    def share(self, part: str, *whole: str) -> float | None:
        """Return which share of the loops' time was spent in a part of it; None if no loop ran."""
        risen = self.risen("data_sets").values()
        total = sum(one[name] for one in risen for name in whole)
        return sum(one[part] for one in risen) / total if total else None

    def routes(self) -> dict[str, dict[str, float | None]]:
        """Return bytes by route, of those that served any: in all, and per second."""
        found: dict[str, dict[str, float | None]] = {}
        risen = self.risen("engines")
        for one in self._now["engines"]:
            for route, count in one["bytes"].items():
                if count:
                    rate = self.per_s(risen[one["id"]]["bytes"][route]) if self.is_known else None
                    found[route] = _added(found.get(route, {}), {"bytes": count, "bytes_per_s": rate})
        return found

    def of_part(self, part: str, name: str) -> float | None:
        """Return the rate of a counter of a part that there is once."""
        if self._before is None or not self._before.get(part):
            return None
        return self.per_s(max(0, self._now[part][name] - self._before[part].get(name, 0)))


def _counters(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of an object, and its dicts of numbers."""
    found: dict[str, Any] = {}
    for name, value in one.items():
        if isinstance(value, Mapping) and name == "bytes":
            found[name] = dict(value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "id":
            found[name] = value
    return found


def _data_set(one: Mapping[str, Any], rate: _Rates) -> View:
    risen = rate.risen("data_sets").get(one["id"], {})
    batches = risen.get("batches", 0)
    names = ("source", "files", "epoch", "epoch_batch", "epoch_batches", "ring", "batches", "stalls", "stall_s")
    return {
        **{name: one[name] for name in names},
        "bytes": sum(one["bytes"].values()),
        "batches_per_s": rate.per_s(batches) if rate.is_known else None,
        "bytes_per_s": rate.per_s(sum(risen["bytes"].values())) if rate.is_known else None,
        "mean_ready": risen["ready_sum"] / batches if batches else None,
        "stall_share": min(1.0, rate.per_s(risen["stall_s"])) if rate.is_known else None,
    }


def _workers(engines: Iterable[Mapping[str, Any]], rate: _Rates) -> View:
    """Return the workers of all engines, and which share of their time they spent in what."""
    risen, count = rate.risen("engines").values(), sum(one["workers"] for one in engines)
    found: View = {"count": count, "errors": sum(one["errors"] for one in engines)}
    for what in _WORKER_TIMES:
        seconds = sum(one[f"worker_{what}_s"] for one in risen)
        found[what] = min(1.0, rate.per_s(seconds) / count) if rate.is_known and count else None
    found["storage_bytes_per_s"] = rate.sum_of("engines", "storage_bytes")
    found["requests_per_s"] = rate.sum_of("engines", "requests")
    return found


def _saves(saves: Iterable[Mapping[str, Any]], rate: _Rates) -> list[View]:
    risen, found = rate.risen("saves"), []
    for one in saves:
        rose = risen.get(one["id"], {})
        names = ("folder", "step", "upload", "begun", "complete", "failed", "stall_s", *_SAVE_BYTES)
        speeds = {f"{name}_per_s": rate.per_s(rose[name]) if rose else None for name in _SAVE_BYTES}
        found.append({**{name: one[name] for name in names}, **speeds})
    return found


def _cache(now: Mapping[str, Any], rate: _Rates) -> View | None:
    """Return the cache's space, and the bytes that came from it and into it."""
    cache = now.get("cache")
    if not cache:
        return None
    routes = rate.routes()
    none = {"bytes": 0, "bytes_per_s": 0.0 if rate.is_known else None}
    hit, fetched = routes.get("local_cache", none), routes.get("cache_fill", none)
    total = (hit["bytes"] or 0) + (fetched["bytes"] or 0)
    return {
        "folder": cache["folder"],
        **{name: cache[name] for name in _CACHE},
        "hit_bytes": hit["bytes"],
        "hit_bytes_per_s": hit["bytes_per_s"],
        "hit_share": (hit["bytes"] or 0) / total if total else None,
        "filled_bytes_per_s": rate.of_part("cache", "filled_bytes"),
    }


def _requests(counts: Mapping[str, Any] | None, names: Iterable[str], rate: _Rates, part: str) -> View | None:
    """Return counts of requests with their rates; None if there were none."""
    if not counts or not counts["requests"]:
        return None
    return {
        **{name: counts[name] for name in names},
        **{f"{name}_per_s": rate.of_part(part, name) for name in names if name != "connections"},
    }


# ------------------------------------------------------------------------------------------------- sums of processes


def _sum(processes: Iterable[View]) -> View:
    """Return the sums of all processes. Shares are means."""
    found: View = {"processes": 0, "batches_per_s": None, "routes": {}, "workers": {}, "saves": {}, "caches": {}}
    found |= {"network": {}, "stores": {}, "input_share": None, "checkpoint_share": None}
    shares: dict[str, list[float]] = {"input_share": [], "checkpoint_share": []}
    for one in processes:
        found["processes"] += 1
        found["batches_per_s"] = _plus(found["batches_per_s"], one["batches_per_s"])
        for route, counts in one["routes"].items():
            found["routes"][route] = _added(found["routes"].get(route, {}), counts)
        found["workers"] = _added(found["workers"], {"count": one["workers"]["count"]})
        for save in one["saves"]:
            found["saves"] = _added(found["saves"], _numbers(save))
        if one["cache"] is not None:
            found["caches"][f"{one['host']}:{one['cache']['folder']}"] = one["cache"]["used_bytes"]
        for part in ("network", "stores"):
            found[part] = _added(found[part], _numbers(one[part] or {}))
        for share, values in shares.items():
            if one[share] is not None:
                values.append(one[share])
    found["cache_bytes"] = sum(found.pop("caches").values())  # of each cache once: processes share it
    found |= {share: sum(values) / len(values) for share, values in shares.items() if values}
    return found


def _numbers(one: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: value for name, value in one.items() if value is None or isinstance(value, (int, float))}


def _added(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: _plus(one.get(name), other.get(name)) for name in {**one, **other}}


def _plus(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
