"""Means, percentiles and Student's intervals of repeated measurements.

Student's t is computed here rather than looked up: scipy is no dependency, a table ends somewhere,
and a normal approximation is far too sure for three repeats (1.96 in place of 4.30). With t =
sqrt(dof) tan(a) the distribution is an integral of a power of the cosine over a short stretch.
Simpson's rule gives it to seven digits for any `dof` from 1 on, whole or not.
"""

import functools
import math
import statistics

import numpy as np

CONFIDENCE = 0.95
INTERVALS = 128  # of Simpson's rule: an even number
PERCENTILES = {"median": 50, "p90": 90, "p99": 99}


def t_probability(t, dof):
    """Return the probability of -t to t in Student's distribution, of `dof` from 1 on."""
    angles, step = np.linspace(0.0, math.atan(t / math.sqrt(dof)), INTERVALS + 1, retstep=True)
    heights = np.cos(angles) ** (dof - 1)
    integral = (heights[0] + heights[-1] + 4 * heights[1:-1:2].sum() + 2 * heights[2:-1:2].sum()) * step / 3
    return 2 * math.exp(math.lgamma((dof + 1) / 2) - math.lgamma(dof / 2)) / math.sqrt(math.pi) * float(integral)


@functools.lru_cache(maxsize=1024)
def t_quantile(confidence, dof):
    """Return the t that a value lies within with probability `confidence`."""
    low, high = 0.0, 2.0
    while t_probability(high, dof) < confidence:
        low, high = high, 2 * high
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if t_probability(middle, dof) < confidence else (low, middle)
    return high


def mean_interval(values, confidence=CONFIDENCE):
    """Return (low, high) of the mean of independent values; None for fewer than two."""
    if len(values) < 2:
        return None
    half = t_quantile(confidence, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - half, mean + half


def ratio_interval(before, after, confidence):
    """Return (ratio, low, high) of geometric means, `after` to `before`."""
    # Welch's interval on logarithms: times scatter by factors, and the two need not scatter alike.
    logs = [[math.log(value) for value in values] for values in (before, after)]
    ratio = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    errors = [statistics.variance(ones) / len(ones) for ones in logs]
    total, half = sum(errors), 0.0
    if total:
        terms = [error**2 / (len(ones) - 1) for error, ones in zip(errors, logs, strict=True)]
        half = t_quantile(confidence, total**2 / sum(terms)) * math.sqrt(total)
    return math.exp(ratio), math.exp(ratio - half), math.exp(ratio + half)


def described(values):
    """Return the figures of many measurements in their unit; percentiles are numpy's."""
    interval = mean_interval(values)
    return {
        "count": len(values),
        "mean": statistics.fmean(values),
        "mean_low": interval and interval[0],
        "mean_high": interval and interval[1],
        "stdev": statistics.stdev(values) if interval else None,
        "min": min(values),
        "max": max(values),
        **{name: float(np.percentile(values, share)) for name, share in PERCENTILES.items()},
    }
