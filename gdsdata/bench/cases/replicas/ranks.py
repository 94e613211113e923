"""The ranks of a row as the row's process sees them."""

import contextlib
import multiprocessing.connection
import os
import sys
import time
from typing import Any

import torch

from gdsdata.bench.harness.process import SAMPLING_SECONDS, RowFailed, RowProcess
from gdsdata.bench.measure import device, system

STARTING_S = 240  # imports of all rows at once; less than the bench's own patience with the row
GRACE_S = 2.0  # for the errors of other ranks, once one has failed


class RankFailed(Exception):
    """A rank has ended, is silent, or has answered with an error."""


class Ranks:
    """Processes that are the ranks of one process group. All get the same commands.

    If one fails, all are killed: the others may wait for it.

    Args:
        row: name of the class in `rank`.
        settings: say how many, and how long an answer may take.
        device_name: cpu, or cuda: then each has the GPU of its number.
        command: more of `load`, for all.

    Raises (each method):
        RankFailed: with the errors of the ranks.
    """

    def __init__(self, row, settings, device_name, **command):
        self.patience_s, count = settings.patience_s, settings.ranks
        command |= {"row": f"{__package__}.rank:{row}", "settings": settings, "parent": os.getpid()}
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # All are on this host.
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(count))  # as a launcher says it
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = [RowProcess(sys.stdout.buffer) for _ in range(count)]
        names = [f"cuda:{rank}" if device.is_cuda(device_name) else device_name for rank in range(count)]
        of_each = [{"rank": rank, "port": self.store.port, "device_name": name} for rank, name in enumerate(names)]
        self._asked("load", [command | one for one in of_each], STARTING_S)

    def ask(self, do, **command):
        return self._asked(do, [command] * len(self.processes), self.patience_s)

    def ask_and_sample(self, do, **command):
        """Return the answers, and the peak of all ranks' memory above what they had, in bytes."""
        before = self.peak_bytes = self._memory_bytes()
        found = self._asked(do, [command] * len(self.processes), self.patience_s, samples=True)
        return found, self.peak_bytes - before

    def _asked(self, do, commands, within_s, samples=False):
        answers: dict[int, Any] = {}
        errors: dict[int, RowFailed] = {}
        ends = time.monotonic() + within_s
        for rank, (process, command) in enumerate(zip(self.processes, commands, strict=True)):
            try:
                process.send(do, **command)
            except RowFailed as failed:
                errors[rank] = failed
        waiting: dict[Any, int] = {
            process.pipe: rank for rank, process in enumerate(self.processes) if rank not in errors
        }
        while waiting and time.monotonic() < ends:
            for pipe in multiprocessing.connection.wait(list(waiting), SAMPLING_SECONDS if samples else 1.0):
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = self.processes[rank].receive()
                except RowFailed as failed:
                    errors[rank] = failed
            if errors:
                ends = min(ends, time.monotonic() + GRACE_S)
            if samples:
                self.peak_bytes = max(self.peak_bytes, self._memory_bytes())
        if errors or waiting:
            self.kill()
            # Ranks that only wait for one that failed are not named.
            told = errors or dict.fromkeys(waiting.values(), RowFailed(f"no answer within {within_s} s"))
            raise RankFailed("; ".join(f"rank {rank}: {why}" for rank, why in sorted(told.items())))
        return [answers[rank] for rank in range(len(self.processes))]

    def _memory_bytes(self):
        total = 0
        for process in self.processes:
            with contextlib.suppress(OSError):  # it has ended
                total += system.own_bytes(process.process.pid)
        return total

    def kill(self):
        for process in self.processes:
            process.process.kill()
            process.process.wait()
