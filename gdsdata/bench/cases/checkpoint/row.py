"""The row's side of case=checkpoint."""

import os
import statistics
import time
from typing import Any

from gdsdata.bench.cases.checkpoint import stock
from gdsdata.bench.data import checkpoints
from gdsdata.bench.harness.row import Row, trim
from gdsdata.bench.measure import device, steps, system

# The first save makes memory; the third has training steps beside it.
ASYNC_STEPS = (1, 2, 3)
STEPS_S = 2.0  # of steps with nothing beside them
PREPARED_BYTES_PER_S = 0.25e9


class CheckpointRow(Row):
    """`tensors` is the state that is saved, or what a load fills."""

    tensors: Any = None
    firsts: dict[str, float]  # figures of the first save or load
    staging_bytes = 0

    def set_up(self):
        self.kind, self.state = self.source.kind, self.source.state

    @property
    def path(self):
        return self.source.path_of(self.key, self.peer_class.saves, self.peer_class.loads)

    def describe(self):
        said, peer = super().describe(), self.peer_class
        if peer.saves and not peer.durable:
            said["setting"] += "; its files and folders are then synced"
        return said | {"saves": peer.saves, "loads": peer.loads}

    def construct(self):
        self.peer = self.peer_class(self.device, self.engine)

    def prepare(self, touched_bytes):
        self.drop()
        super().prepare(touched_bytes)
        self.make_tensors()

    def make_tensors(self):
        """Makes the tensors."""
        self.tensors = (self.state.empty if self.kind == "load" else self.state.make)(self.device)
        if self.kind == "load":  # No row is timed for getting device memory from the driver.
            device.reserve(self.device, self.state.bytes)
        device.synchronize(self.device)

    def drop(self):
        """Frees the tensors' memory, of which other rows' processes need as much."""
        self.tensors = None
        trim()
        device.release(self.device)

    def save(self, path):
        self.peer.save(self.tensors, path)
        if not self.peer.durable:
            checkpoints.Saved(path).sync()

    def load(self, path):
        self.peer.load(self.tensors, path)

    def fetched(self, path):
        """Return where a save's own library reads it."""
        return path

    # Commands of the case:

    def write(self, path):
        """Makes the file that other rows load."""
        try:
            self.tensors = self.state.make(self.device)
            self.construct()
            self.save(path)
        finally:
            self.close()
            self.drop()
        return {}

    def begin(self, cache):
        """Makes what a timed save finds: an older checkpoint, or staging memory."""
        if cache == "staged":
            before = system.own_bytes(os.getpid())
            self.construct()
            self.peer.open(self.path, self.tensors)
            self.save_first()
            self.staging_bytes = max(0, system.own_bytes(os.getpid()) - before)
        elif cache == "replaced":
            self.construct()
            self.save(self.path)
            self.close()
        return {}

    def run(self, dtype, cache):
        if self.kind == "async":
            return self.run_async()
        self.start_cpu_clock()
        started = time.perf_counter()
        self.construct()
        if self.kind == "save":
            self.save(self.path)
        else:
            self.load(self.path)
        return self.facts(self.now() - started, {})

    def run_async(self):
        """`seconds` block caller and stream; `background_s` are all until it is stored."""
        served_before = self.peer.served()
        self.start_cpu_clock()
        started = time.perf_counter()
        stall_s = self.stall_of(ASYNC_STEPS[1])
        saved = self.peer.wait()
        if not self.peer.durable:
            checkpoints.Saved(saved).sync()
        found = self.facts(stall_s, served_before)
        found |= {"background_s": time.perf_counter() - started, "staging_bytes": self.staging_bytes}
        return found | self.take_steps(saved)

    def save_first(self):
        """Makes staging memory; returns the stall."""
        stall_s = self.stall_of(ASYNC_STEPS[0])
        saved = self.peer.wait()
        if not self.peer.prunes:
            checkpoints.Saved(saved).remove()
        return stall_s

    def stall_of(self, step):
        """Seconds that a save blocks the caller, and later work of its stream."""
        started = time.perf_counter()
        self.peer.save(self.tensors, step)
        device.wait_for_stream(self.device)
        return time.perf_counter() - started

    def take_steps(self, saved):
        """Medians of training steps beside one more save, and before and after it.

        Their CPU time is not the row's.
        """
        if not self.peer.prunes:
            checkpoints.Saved(saved).remove()
        used_before = system.cpu_seconds()
        training = steps.TrainingSteps(self.device)
        alone = training.take_for(STEPS_S / 2)
        self.peer.save(self.tensors, ASYNC_STEPS[2])
        beside = training.take_while(lambda: not self.peer.is_done())
        self.peer.wait()
        alone += training.take_for(STEPS_S / 2)
        self.cpu_before += system.cpu_seconds() - used_before
        return {"step_s": statistics.median(alone), "step_beside_s": statistics.median(beside)}

    def facts(self, seconds, served_before):
        path = self.peer.way_in if self.kind == "load" else self.peer.way_out
        found = self.figures(self.state.bytes, seconds, served_before, path)
        return found | {"stated_bytes": self.peer.stated_bytes()}

    def compare(self):
        """Compares every bit that a timed load filled, and frees memory."""
        try:
            if self.kind == "load":
                self.state.check(self.tensors)
        finally:
            self.drop()
        return {}

    def verify(self, dtype):
        """Compares every bit that was loaded, or that its own library reads of a save.

        It is the first load or save of the process, which is timed too.
        """
        self.make_tensors()
        self.firsts = {}
        try:
            self.state.check({"load": self.loaded, "save": self.saved, "async": self.saved_beside_steps}[self.kind]())
        finally:
            self.close()
            self.drop()
            if self.kind != "load":
                self.remove()
        return {"checked_bytes": self.state.bytes, **self.firsts}

    def warm(self):
        system.warm(checkpoints.Saved(self.path).files)

    def remove(self):
        checkpoints.Saved(self.path).remove()
        return {}

    def loaded(self):
        self.warm()
        self.construct()
        self.firsts["first_s"] = self.seconds_of(self.load, self.path)
        return self.tensors

    def saved(self):
        system.touch_memory(self.state.bytes)
        self.construct()
        self.firsts["first_s"] = self.seconds_of(self.save, self.path)
        self.tensors = self.state.empty("cpu")
        stock.reader_of(self.peer_class.saves)("cpu").load(self.tensors, self.fetched(self.path))
        return self.tensors

    def saved_beside_steps(self):
        system.touch_memory(self.state.bytes)
        training = steps.TrainingSteps(self.device)
        self.construct()
        self.peer.open(self.path, self.tensors)
        preparing_s = STEPS_S / 2 + self.state.bytes / PREPARED_BYTES_PER_S  # of its memory, in the background
        self.firsts["step_before_first_s"] = statistics.median(training.take_for(preparing_s))
        self.firsts["first_s"] = self.save_first()
        self.peer.save(self.tensors, ASYNC_STEPS[1])
        for tensor in self.tensors.values():
            tensor.zero_()  # As soon as `save` has returned: storage must have what it was.
        self.peer.wait()
        return stock.tensors_in(self.path, self.state.empty("cpu"))
