"""The ranks of a row, in place of the RowProcess of other cases."""

import collections
import contextlib
import multiprocessing.connection
import os
import subprocess
import time
from typing import Any

import torch.distributed

from gdsdata.bench.harness.process import ENDING_SECONDS, SAMPLING_SECONDS, RowFailed, RowProcess
from gdsdata.bench.measure import device, system

STARTING_S = 240  # imports of all rows at once
GRACE_S = 2.0  # for the errors of other ranks, once one has failed


class Ranks(RowProcess):
    """Processes that are the ranks of one process group. All get the same commands.

    Their answers are one answer. If a rank fails, all are killed, because the others may wait for
    it: RowFailed then has the errors of the ranks.

    Args:
        settings: say how many, and how long an answer may take.
        device_name: cpu, or cuda: then each has the GPU of its number.
    """

    def __init__(self, log, settings, device_name):
        self.peak_bytes, self.patience_s = 0, settings.patience_s
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks = [RowProcess(log) for _ in range(settings.ranks)]
        self.devices = [device_name] * settings.ranks
        if device.is_cuda(device_name):
            self.devices = [f"cuda:{rank}" for rank in range(settings.ranks)]

    def send(self, do, **command):
        self.do, self.within_s = do, STARTING_S if do == "load" else self.patience_s
        for rank, process in enumerate(self.ranks):
            if do == "load":
                command |= {"rank": rank, "parent": os.getpid(), "port": self.store.port}
                command["device_name"] = self.devices[rank]
            with contextlib.suppress(RowFailed):  # A process that has ended says so when it is asked.
                process.send(do, **command)

    def receive(self, sample_memory=False, timeout=None):
        answers, errors = {}, {}
        ends = time.monotonic() + self.within_s
        waiting: dict[Any, int] = {process.pipe: rank for rank, process in enumerate(self.ranks)}
        while waiting and time.monotonic() < ends:
            for pipe in multiprocessing.connection.wait(list(waiting), SAMPLING_SECONDS if sample_memory else 1.0):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = self.ranks[rank].receive()
                except RowFailed as failed:
                    errors[rank] = failed
            if errors:
                ends = min(ends, time.monotonic() + GRACE_S)
            if sample_memory:
                self.note_memory()
        if errors or waiting:
            self.kill()
            # Ranks that only wait for one that failed are not named.
            told = errors or dict.fromkeys(waiting.values(), RowFailed(f"no answer within {self.within_s} s"))
            raise RowFailed("; ".join(f"rank {rank}: {why}" for rank, why in sorted(told.items())))
        return merged(self.do, [answers[rank] for rank in range(len(self.ranks))])

    def memory_bytes(self):
        total = 0
        for process in self.ranks:
            with contextlib.suppress(OSError):  # it has ended
                total += system.own_bytes(process.process.pid)
        return total

    def dismiss(self):
        """Do nothing: a rank that ends by itself may wait for another."""

    def kill(self):
        for process in self.ranks:
            process.process.kill()
        ends = time.monotonic() + ENDING_SECONDS
        for process in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):  # The kernel may hold it.
                process.process.wait(max(0.0, ends - time.monotonic()))

    def end(self, within_s=0.0):
        self.kill()


def merged(do, answers):
    """Return the answer of all ranks to a command."""

    def of_all(name, combine):
        return {name: combine(one[name] for one in answers)}

    if do == "verify":
        return {name: max(one[name] for one in answers) for name in answers[0]}
    if do == "close":
        return of_all("cpu_seconds", sum)
    if do == "all_gather":
        return of_all("gb_per_s", min)
    if do == "pinned_copies":
        return answers[0] | of_all("gb_per_s", sum)
    if do != "run":
        return answers[0]
    served: collections.Counter[str] = collections.Counter()
    for one in answers:
        served.update(one["served"])
    # From the barrier to the end of the last rank.
    seconds = max(one["ended"] for one in answers) - min(one["began"] for one in answers)
    more = of_all("storage_bytes", sum) | of_all("device_peak_bytes", max)
    return answers[0] | more | {"seconds": seconds, "served": dict(served)}
