"""The common part of all workloads of a soak: folders, the store, counts, and the pace."""

import collections
import os
import resource
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from long_runs.store import Client

TICKS = os.sysconf("SC_CLK_TCK")
SPARE_S = 2.0  # of processor time that was not used, and may be later


class Counts:
    """Named counts that any thread may add to."""

    def __init__(self) -> None:
        self.lock, self.counter = threading.Lock(), collections.Counter()

    def add(self, **more: int) -> None:
        with self.lock:
            self.counter.update(more)

    def all(self) -> dict[str, int]:
        with self.lock:
            return dict(self.counter)


class Pace:
    """Holds turns back, so that the program and the store use a share of one core."""

    def __init__(self, cores: float, store_pid: int | None, ends_at: float) -> None:
        self.cores, self.store_pid, self.ends_at = cores, store_pid, ends_at
        self.stopped = threading.Event()
        self.lock = threading.Lock()
        self.before = time.monotonic(), self.used_s()
        self.balance_s = 0.0

    def used_s(self) -> float:
        used = sum(
            usage.ru_utime + usage.ru_stime
            for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        )
        try:
            fields = Path(f"/proc/{self.store_pid}/stat").read_text().rpartition(")")[2].split()
            return used + (int(fields[11]) + int(fields[12])) / TICKS
        except (OSError, IndexError):
            return used

    def goes_on(self) -> bool:
        """Wait for this turn's share of the core; False when the soak is over."""
        while not self.is_over():
            with self.lock:
                now, used = time.monotonic(), self.used_s()
                self.balance_s += (now - self.before[0]) * self.cores - (used - self.before[1])
                self.balance_s = min(self.balance_s, SPARE_S)
                self.before = now, used
                if self.balance_s > 0:
                    return True
            self.stopped.wait(0.05)
        return False

    def is_over(self) -> bool:
        return self.stopped.is_set() or time.monotonic() >= self.ends_at


class World:
    """Where a workload works.

    Attributes:
        folder: of everything that is written.
        device: of batches, but for those of other processes.
        random: of this workload alone.
        counts: of all.
        child_s: a forked child that takes longer hangs.
    """

    def __init__(
        self, folder: Path, device: str, client: Client, random: Random, counts: Counts, child_s: float
    ) -> None:
        self.folder, self.device, self.client, self.random, self.counts = folder, device, client, random, counts
        self.child_s = child_s

    def subfolder(self, *names: str) -> Path:
        folder = self.folder.joinpath(*names)
        folder.mkdir(parents=True, exist_ok=True)
        return folder


class Workload:
    """Does one kind of work again and again. The seam of the soak: one subclass for each kind."""

    def __init__(self, world: World) -> None:
        self.world, self.random, self.counts = world, world.random, world.counts

    def turn(self) -> None:
        """Do a piece of work, and check all of its bytes. Any exception is a finding."""
        raise NotImplementedError

    def close(self) -> None:
        """End what is in progress."""

    def statistics(self) -> dict[str, Any]:
        """Return what the engine says, for the sampler. Called on another thread."""
        return {}
