"""Says of each series of samples whether it is flat."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

WARM_UP = 0.25  # the share of a run that is not judged: heaps, pools and caches fill
FEWEST_SAMPLES = 8
MOST_SAMPLES = 600  # the pairs of more take too long
BLOCKS = 12  # of which the lowest values are compared
FEWEST_OF_BLOCK = 5


class Bound(NamedTuple):
    """How much a series may grow over the judged time: the larger of both."""

    share: float  # of its median
    absolute: float


# By the beginning of a series' name; the first that fits. Counts of progress have none.
BOUNDS = {
    "rss_mib": Bound(0.06, 24),
    "pss_mib": Bound(0.06, 24),
    "private_mib": Bound(0.06, 24),
    "anonymous_mib": Bound(0.06, 24),
    "fd": Bound(0.1, 4),
    "threads": Bound(0.1, 3),
    "children": Bound(0.1, 2),
    "disk": Bound(0.1, 6),
    "count_objects": Bound(0.02, 4000),
}


# Forked children share memory with the program. So these are judged in samples without children.
SHARED_WITH_CHILDREN = ("pss_mib", "private_mib")


class Verdict(NamedTuple):
    """The verdict on a series.

    Attributes:
        growth: of the values or of the lowest ones, whichever is less, in the series' unit.
        allowed: the bound.
        median: of the judged samples.
    """

    name: str
    growth: float
    allowed: float
    median: float

    @property
    def is_flat(self) -> bool:
        """Whether it does not grow. A series that shrinks is flat."""
        return self.growth <= self.allowed

    def __str__(self) -> str:
        word = "flat" if self.is_flat else "NOT FLAT"
        return f"{self.name}: median {self.median:.1f}, growth {self.growth:+.1f} (allowed {self.allowed:.1f}): {word}"


def slope_of(times: np.ndarray, values: np.ndarray) -> float:
    """Return the Theil-Sen slope: the median of the slopes of all pairs.

    Up to 29 % of the samples may be anything, so peaks count for nothing.
    """
    step = -(-len(times) // MOST_SAMPLES)
    times, values = times[::step], values[::step]
    first, second = np.triu_indices(len(times), 1)
    return float(np.median((values[second] - values[first]) / (times[second] - times[first])))


def growth_of(times: np.ndarray, values: np.ndarray) -> float:
    """Return how much a series grows: the slope times the time.

    A leak is never released, so it lifts the lowest values as well. The work at the end of a run
    does not. So the lower growth of both counts.
    """
    slopes = [slope_of(times, values)]
    if len(values) >= BLOCKS * FEWEST_OF_BLOCK:
        lowest = [block[values[block].argmin()] for block in np.array_split(np.arange(len(values)), BLOCKS)]
        slopes.append(slope_of(times[lowest], values[lowest]))
    return min(slopes) * float(times[-1] - times[0])


def bound_of(name: str) -> Bound | None:
    return next((bound for start, bound in BOUNDS.items() if name.startswith(start)), None)


def judge(rows: Sequence[Mapping[str, float]], warm_up: float = WARM_UP) -> list[Verdict]:
    """Judge every series that has a bound.

    Raises:
        ValueError: there are too few samples.
    """
    times = np.array([row["seconds"] for row in rows])
    judged = [row for row in rows if row["seconds"] >= warm_up * times[-1]] if len(rows) else []
    if len(judged) < FEWEST_SAMPLES:
        raise ValueError(f"{len(judged)} samples behind the warm-up are too few: run longer, or sample more often")
    verdicts = []
    for name in judged[-1]:
        if (bound := bound_of(name)) is None:
            continue
        alone = name in SHARED_WITH_CHILDREN
        having = [row for row in judged if name in row and not (alone and row.get("children"))]
        when, values = (np.array([row[key] for row in having]) for key in ("seconds", name))
        if len(having) < FEWEST_SAMPLES:
            continue  # private memory is in `anonymous_mib` too
        median = float(np.median(values))
        verdicts.append(Verdict(name, growth_of(when, values), max(bound.absolute, bound.share * abs(median)), median))
    return verdicts
