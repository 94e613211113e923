"""Rows that are measured beside each other, and what results.json says of them."""

import collections

from gdsdata.bench.measure import system


class Row:
    """One row of one table, and its runs so far."""

    def __init__(self, table, key, process):
        self.table, self.key, self.process = table, key, process
        self.described = {"key": key, "name": key, "setting": ""}
        self.runs, self.error, self.checked = [], None, {}

    def spread(self, name):
        return system.spread([run.get(name) for run in self.runs])

    @property
    def rates(self):
        """GB/s of each run; a run's `bytes` are those of the files."""
        return [run["bytes"] / run["seconds"] / 1e9 for run in self.runs]

    def summary(self):
        """Return the fields of every case."""
        costs = [run["cpu_seconds"] / run["bytes"] * 1e9 for run in self.runs if run["bytes"]]
        served: collections.Counter[str] = collections.Counter()
        for run in self.runs:
            served.update(run["served"])
        return {
            "data": self.table.source.kind,
            "dtype": self.table.dtype,
            "cache": self.table.cache,
            **self.described,
            "verified": bool(self.checked) and self.error is None,
            "error": self.error,
            **self.checked,
            "gb_per_s": system.spread(self.rates),
            "seconds": self.spread("seconds"),
            "cpu_s_per_gb": system.spread(costs),
            "peak_bytes": max((run["peak_bytes"] for run in self.runs), default=None),
            "path": path_text(served, self.runs[0]["path"] if self.runs else ""),
            "served_bytes": dict(served),
            "resident_before": self.spread("resident_before"),
            "runs": self.runs,
        }


class Table:
    """Rows measured together: one source, one dtype, one state of the page cache."""

    def __init__(self, source, dtype, cache, rows=()):
        self.source, self.dtype, self.cache, self.rows = source, dtype, cache, list(rows)

    @property
    def name(self):
        return f"{self.dtype}, {self.cache}"

    @property
    def full_name(self):
        return f"{self.source.kind} {self.name}"


def path_text(served, otherwise):
    """Return the paths that served the bytes, with their shares if there are several."""
    total = sum(served.values())
    if not total:
        return otherwise
    shares = sorted(((count / total, path) for path, count in served.items()), reverse=True)
    if shares[0][0] >= 0.995:
        return shares[0][1]
    return ", ".join(f"{path} {share:.0%}" for share, path in shares if share >= 0.005)


def is_ours(key):
    return key.split("_")[0] == "gdsdata"
