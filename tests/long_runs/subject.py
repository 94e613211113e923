"""The program of a soak: workloads on several threads, whose counts go to a file.

    python -m long_runs.subject SETTINGS.json

Workloads that fork have the main thread. Ends with 1 if any workload raised.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from random import Random
from typing import Any

import torch

from gdsdata.io import engine
from long_runs import reading, saving
from long_runs.leaks import LEAKS
from long_runs.store import Client
from long_runs.world import Counts, Pace, Workload, World

# The workloads of each thread. The first ones are the main thread's.
THREADS: tuple[tuple[type[Workload], ...], ...] = (
    (reading.LoaderEpochs, reading.ForkedReads),
    (reading.LocalEpochs, reading.FailingReads, reading.ReplacedFiles),
    (reading.RemoteEpochs,),
    (saving.BackgroundSaves, saving.DirectSaves, saving.FailingSaves),
)
REPORT_S = 1.0
MOST_ERRORS = 5  # of a thread, which then ends
ENGINE_COUNTS = ("transfers", "requests", "segments", "errors", "retries")
NETWORK_COUNTS = ("requests", "retries", "hedges", "connections")


class Worker:
    """A thread's workloads, which take turns at random."""

    def __init__(self, place: int, settings: dict[str, Any], counts: Counts, pace: Pace) -> None:
        random = Random(f"{settings['seed']} {place}")
        client = Client(settings["endpoint_url"])
        self.world = World(Path(settings["folder"]), settings["device"], client, random, counts, settings["child_s"])
        self.workloads = [kind(self.world) for kind in THREADS[place]]
        self.place, self.pace, self.errors = place, pace, 0
        self.leak = LEAKS[settings["leak"]]() if settings["leak"] and place == 0 else None

    def run(self) -> None:
        while self.errors < MOST_ERRORS and self.pace.goes_on():
            workload = self.world.random.choice(self.workloads)
            self.attempt(workload.turn, workload)
            self.world.counts.add(**{"turns": 1, f"turns_{self.place}": 1})
            if self.leak:
                self.leak()
        for workload in self.workloads:
            self.attempt(workload.close, workload)

    def attempt(self, function: Any, workload: Workload) -> None:
        try:
            function()
        except Exception:
            self.errors += 1
            self.world.counts.add(wrong=1)
            print(f"{time.strftime('%H:%M:%S')} {type(workload).__name__}:", file=sys.stderr)
            traceback.print_exc()
            sys.stderr.flush()


class Reporter:
    """Writes the counts to a file, for the process that samples."""

    def __init__(self, path: Path, counts: Counts, workers: list[Worker]) -> None:
        self.path, self.counts, self.workers = path, counts, workers
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.run, name="reporter")
        self.thread.start()

    def run(self) -> None:
        while not self.ended.wait(REPORT_S):
            self.write()
        self.write()

    def write(self) -> None:
        found: dict[str, Any] = self.counts.all()
        for worker in self.workers:
            for workload in worker.workloads:
                said = workload.statistics()
                found |= {f"network_{name}": said["network"][name] for name in NETWORK_COUNTS if "network" in said}
        found["objects"] = tracked_objects()
        found["engines"] = len(engine._engines)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(found))
        part.rename(self.path)

    def end(self) -> None:
        self.ended.set()
        self.thread.join()


def tracked_objects() -> int:
    """Count the objects that Python's collector tracks.

    `map` calls both functions without a switch of threads between them. A list of all objects
    refers to tuples that other threads are making, and CPython raises SystemError when it resizes
    a tuple that has a second reference.
    """
    return next(map(len, map(gc.get_objects, [None])))


def main() -> int:
    settings = json.loads(Path(sys.argv[1]).read_text())
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GDSDATA_CACHE"] = ""
    counts = Counts()
    pace = Pace(settings["cores"], settings["store_pid"], time.monotonic() + settings["seconds"])
    signal.signal(signal.SIGTERM, lambda *_: pace.stopped.set())
    workers = [Worker(place, settings, counts, pace) for place in range(len(THREADS))]
    reporter = Reporter(Path(settings["counts"]), counts, workers)
    threads = [threading.Thread(target=worker.run, name=f"worker-{i}") for i, worker in enumerate(workers) if i]
    for thread in threads:
        thread.start()
    workers[0].run()
    for thread in threads:
        thread.join()
    reporter.end()
    return 1 if counts.all().get("wrong") else 0


if __name__ == "__main__":
    sys.exit(main())
