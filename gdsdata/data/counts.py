"""Sums of a data set's counts: of one iterator and of those before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gdsdata.io.engine import ROUTES

ADDED = ("batches", "stalls", "stall_s", "ring_full_s")


def nothing() -> dict[str, Any]:
    """Return the counts of no iterator."""
    return {"bytes": dict.fromkeys(ROUTES, 0), **dict.fromkeys(ADDED, 0), "mean_ready": 0.0}


def sum_of(totals: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of both, and the mean of ``mean_ready`` over all batches."""
    batches = totals["batches"] + more["batches"]
    ready = totals["mean_ready"] * totals["batches"] + more["mean_ready"] * more["batches"]
    return {
        "bytes": sum_of_routes(totals["bytes"], more["bytes"]),
        **{key: totals[key] + more[key] for key in ADDED},
        "mean_ready": ready / batches if batches else 0.0,
    }


def sum_of_routes(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the sum of bytes by the route that served them."""
    return {route: count + other[route] for route, count in one.items()}
