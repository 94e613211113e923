"""Snapshots in Prometheus's text format, version 0.0.4.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gdsdata.observe.live.client import Answers

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class _Metric(NamedTuple):
    """A metric of the objects of a part.

    Attributes:
        name: in Prometheus. A counter's ends in "_total".
        field: of the object.
        help: one line.
    """

    name: str
    field: str
    help: str


_DATA_SET = (
    _Metric("gdsdata_batches_total", "batches", "Batches that were handed out."),
    _Metric("gdsdata_stalls_total", "stalls", "Batches that a loop had to wait for."),
    _Metric("gdsdata_stall_seconds_total", "stall_s", "Time that loops waited for batches that were not ready."),
    _Metric("gdsdata_ring_full_seconds_total", "ring_full_s", "Time in which every slot of the ring was ready."),
    _Metric("gdsdata_input_seconds_total", "input_s", "Time from a loop's request for a batch to the batch."),
    _Metric("gdsdata_transform_seconds_total", "transform_s", "The part of the input time in transform=."),
    _Metric("gdsdata_training_seconds_total", "training_s", "Time from a batch to the next request for one."),
    _Metric("gdsdata_checkpoint_seconds_total", "checkpoint_s", "The part of the training time in saves."),
)
_ENGINE = (
    _Metric("gdsdata_storage_bytes_total", "storage_bytes", "Bytes requested from storage, with alignment and gaps."),
    _Metric("gdsdata_storage_requests_total", "requests", "Requests to storage."),
    _Metric("gdsdata_engine_errors_total", "errors", "Transfers that failed."),
    _Metric("gdsdata_worker_active_seconds_total", "worker_active_s", "Time in which workers worked."),
    _Metric("gdsdata_worker_storage_seconds_total", "worker_storage_s", "Time in which workers waited for storage."),
    _Metric("gdsdata_worker_link_seconds_total", "worker_link_s", "Time in which workers waited for copies to GPUs."),
)
_SAVES = (
    _Metric("gdsdata_saves_total", "begun", "Saves in the background that began."),
    _Metric("gdsdata_saves_complete_total", "complete", "Saves in the background that are complete."),
    _Metric("gdsdata_saves_failed_total", "failed", "Saves in the background that failed."),
    _Metric("gdsdata_save_stall_seconds_total", "stall_s", "Time in which these saves blocked their caller."),
    _Metric("gdsdata_save_staged_bytes_total", "staged_bytes", "Bytes that were copied into staging memory."),
    _Metric("gdsdata_save_written_bytes_total", "written_bytes", "Bytes of staging memory that were written."),
    _Metric("gdsdata_save_uploaded_bytes_total", "uploaded_bytes", "Bytes of checkpoints that were sent to a store."),
)
_CACHE = (
    _Metric("gdsdata_cache_filled_bytes_total", "filled_bytes", "Bytes that this process wrote to the cache."),
    _Metric("gdsdata_cache_evicted_bytes_total", "evicted_bytes", "Bytes that this process evicted."),
    _Metric("gdsdata_cache_damaged_blocks_total", "damaged_blocks", "Blocks whose checksum was wrong."),
)
_CACHE_SIZE = (
    _Metric("gdsdata_cache_used_bytes", "used_bytes", "Size of the cache, which processes share."),
    _Metric("gdsdata_cache_limit_bytes", "most_bytes", "Bound of the cache; 0: none is known."),
)
_NETWORK = (
    _Metric("gdsdata_range_requests_total", "requests", "Requests for ranges of objects."),
    _Metric("gdsdata_range_retries_total", "retries", "Those that were sent again."),
    _Metric("gdsdata_range_throttled_total", "throttled", "Those that a server refused because they are too many."),
    _Metric("gdsdata_range_hedges_total", "hedges", "Those that were sent twice because the first was slow."),
    _Metric("gdsdata_range_received_bytes_total", "bytes", "Bytes of ranges that came from servers."),
)
_STORES = (
    _Metric("gdsdata_store_requests_total", "requests", "Other requests to stores: lists, sizes and writes."),
    _Metric("gdsdata_store_retries_total", "retries", "Those that were sent again."),
    _Metric("gdsdata_store_sent_bytes_total", "sent_bytes", "Bytes of bodies that were sent."),
    _Metric("gdsdata_store_received_bytes_total", "received_bytes", "Bytes of bodies that were received."),
)


def text(answers: Answers) -> str:
    """Return the snapshots of all processes in Prometheus's text format.

    Each metric has the labels ``pid``, ``host`` and ``rank``. Data sets have ``data_set`` too,
    engines ``device`` and ``engine``, saves ``folder``, and the cache ``cache``.
    """
    out = _Text()
    for one in answers.snapshots:
        labels = {"pid": one["pid"], "host": one["host"], "rank": "" if one["rank"] is None else one["rank"]}
        out.add("gdsdata_process_start_time_seconds", "Since 1970, when the export began.", labels, one["started_s"])
        for data_set in one["data_sets"]:
            of_data = {**labels, "data_set": data_set["id"]}
            out.add_all(_DATA_SET, of_data, data_set)
            for state in ("ready", "filling"):
                at = {**of_data, "state": state}
                out.add(
                    "gdsdata_ring_slots",
                    "Slots of the ring that are ready, or are read into.",
                    at,
                    data_set["ring"][state],
                )
        for number, engine in enumerate(one["engines"]):
            of_engine = {**labels, "device": engine["device"], "engine": number}
            out.add_all(_ENGINE, of_engine, engine)
            out.add("gdsdata_workers", "Threads that read and write.", of_engine, engine["workers"])
            for route, count in engine["bytes"].items():
                by_route = {**of_engine, "route": route}
                out.add(
                    "gdsdata_bytes_total", "Bytes that were delivered, by the route that served them.", by_route, count
                )
        for save in one["saves"]:
            out.add_all(_SAVES, {**labels, "saver": save["id"], "folder": save["folder"]}, save)
        if one["cache"]:
            of_cache = {**labels, "cache": one["cache"]["folder"]}
            out.add_all((*_CACHE, *_CACHE_SIZE), of_cache, one["cache"])
        for metrics, part in ((_NETWORK, one["network"]), (_STORES, one["stores"])):
            if part:
                out.add_all(metrics, labels, part)
    out.add("gdsdata_processes", "Processes that export their numbers.", {}, len(answers.snapshots))
    out.add("gdsdata_silent_processes", "Processes that did not answer.", {}, len(answers.silent))
    return str(out)


class _Text:
    """Samples, grouped by metric as the format demands."""

    def __init__(self) -> None:
        self._help: dict[str, str] = {}
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, help_: str, labels: Mapping[str, Any], value: float) -> None:
        self._help[name] = help_
        said = ",".join(f'{label}="{str(one).translate(_ESCAPES)}"' for label, one in labels.items())
        self._lines.setdefault(name, []).append(f"{name}{{{said}}} {value!r}" if said else f"{name} {value!r}")

    def add_all(self, metrics: Iterable[_Metric], labels: Mapping[str, Any], part: Mapping[str, Any]) -> None:
        for metric in metrics:
            self.add(metric.name, metric.help, labels, part[metric.field])

    def __str__(self) -> str:
        parts = []
        for name, lines in self._lines.items():
            kind = "counter" if name.endswith("_total") else "gauge"
            parts += [f"# HELP {name} {self._help[name]}", f"# TYPE {name} {kind}", *lines]
        return "\n".join(parts) + "\n"
