"""The row's side of case=tune."""

import torch

from gdsdata.bench.cases.tune.work import WORKS, WrongBytes
from gdsdata.bench.harness.row import Row
from gdsdata.bench.measure import device as gpu


class TuneRow(Row):
    """`peer` is the work, made once; only its options change from run to run."""

    def __init__(self, peer, work, about, device):
        self.key, self.device, self.peer = peer, device, None
        torch.set_num_threads(1)  # Others that compared bytes would still spin while the next run is timed.
        gpu.open_context(device)
        self.work = WORKS[work](**about, device=device)

    def describe(self):
        return {"key": self.key}

    def verify(self, options):
        self.open(options)  # Options that are impossible are no wrong bytes.
        try:
            return self.work.verify(options)
        except ValueError as error:
            raise WrongBytes(str(error)) from error
        finally:
            self.close()

    def open(self, options):
        self.peer = self.work
        self.work.open(options)

    def run(self, seconds, once):
        self.start_cpu_clock()
        return self.work.run(seconds, once)
