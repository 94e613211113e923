"""Draws the samples of a soak: one small panel for each kind of thing, as SVG."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from long_runs.judge import WARM_UP, Verdict

MOST_POINTS = 100  # of a line
_PLACES = re.compile(r'\s(?:d|x|y|width|height|transform)="[^"]*"')  # attributes with coordinates
PANELS: dict[str, tuple[str, ...]] = {
    "memory, MiB": ("rss_mib", "pss_mib", "private_mib"),
    "descriptors": ("fds", "fd_files", "fd_sockets", "fd_pipes", "fd_io_uring", "fd_other"),
    "threads and children": ("threads", "children"),
    "disk, MiB": ("disk_data_mib", "disk_cache_mib", "disk_checkpoints_mib", "disk_saved_mib", "disk_index_mib"),
    "work done": ("count_batches", "count_network_requests"),
    "saves, faults seen, forks": ("count_saves", "count_faults_seen", "count_forks", "count_replaced"),
}


def draw(rows: Sequence[Mapping[str, float]], verdicts: Sequence[Verdict], path: Path, title: str) -> None:
    """Draw an SVG file of less than 100 kB."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    flat = {verdict.name: verdict.is_flat for verdict in verdicts}
    thin = rows[:: -(-len(rows) // MOST_POINTS)]
    minutes = [row["seconds"] / 60 for row in thin]
    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 8, "svg.hashsalt": "gdsdata"}):
        figure, axes = pyplot.subplots(2, 3, figsize=(12, 6), layout="constrained")
        for axis, (name, series) in zip(axes.flat, PANELS.items(), strict=True):
            for one in series:
                label = one.removeprefix("count_").removesuffix("_mib") + ("" if flat.get(one, True) else ": NOT FLAT")
                axis.plot(minutes, [row.get(one, 0) for row in thin], linewidth=0.9, label=label)
            axis.axvspan(0, minutes[-1] * WARM_UP, color="#eeeeee", linewidth=0)
            axis.set_title(name, loc="left", fontsize=9)
            axis.set_xlim(0, minutes[-1])
            axis.set_ylim(bottom=0)
            axis.legend(fontsize=7, frameon=False, loc="best", ncols=2)
            axis.spines[["top", "right"]].set_visible(False)
        for axis in axes[-1]:
            axis.set_xlabel("minutes (grey: not judged)")
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
    path.write_text(re.sub(r"\n\s+", "\n", _PLACES.sub(_in_tenths, path.read_text())))


def _in_tenths(place: re.Match[str]) -> str:
    """Return an attribute with tenths of a point, which are enough."""
    return re.sub(r"(\d\.\d)\d+", r"\1", place[0])
