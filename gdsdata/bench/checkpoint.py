"""case=checkpoint: a state is saved, loaded and saved in the background, beside the machine's limits.

Three kinds of work, each a source of its own with its tables:

    save   to a new file and, with overwrite=true, over an older one; until all is on storage. Limit: raw writes, synced
    load   into tensors that are there, warm and cold. Limit: a memory copy or pinned copy; raw reads
    async  how long save() keeps the caller, once staging memory is there. Limit: a memory copy or pinned copy. Another
           save then has steps of a training loop beside it (steps.TrainingSteps), as there were before it

The state is made anew before each run and dropped behind it (data.State), so that one process at a
time holds it. `peak_bytes` of a run are anonymous and shared memory (RssAnon and RssShmem of
/proc/PID/status, looked at every 20 ms) above what the process had when the clock started, the
state or the tensors to fill included: so what is left is what saving or loading takes on top. VmHWM
would count mapped files' pages, which are the page cache's. Beside it, `stated_bytes` is what
gdsdata's engines say that they take at most.
"""

import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path

from gdsdata.bench import case, checkpoint_peers, data, device, limits, measure, row, steps
from gdsdata.bench.checkpoint_peers import SUFFIXES
from gdsdata.bench.load import TOUCHED_BYTES
from gdsdata.bench.process import RowFailed

ASYNC_STEPS = (1, 2, 3)  # what the first save pays for memory is not timed; the last one has training steps beside it
ASYNC_TIMES = ("background_s", "step_s", "step_beside_s")
STEPS_S = 2.0  # of steps with nothing beside them


@dataclasses.dataclass
class Work:
    """What one kind of work is done with: `saved` has the files to load, by format."""

    kind: str
    state: data.State
    folder: str
    saved: dict = dataclasses.field(default_factory=dict)

    @property
    def files(self):
        return [file for saved in self.saved.values() for file in saved.files] or [self.folder]

    def path(self, key, file_format):
        return os.path.join(self.folder, key + SUFFIXES.get(file_format, ""))


class Checkpoint(case.Case):
    def measure(self):
        settings = self.settings.data
        folder = Path(settings.folder).expanduser() if settings.folder else data.default_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=folder) as self.files_folder:
            return super().measure()

    def sources(self):
        case = self.case
        state = data.State(case.state_bytes, case.tensors, case.dtypes, case.seed)
        for kind in case.work:
            work = Work(kind, state, self.files_folder)
            # A save beside an older one or a limit's file, or three formats.
            data.need_space(work.folder, f"case.work=[{kind}]", 3 * state.bytes, "case.state_bytes=")
            if kind == "load":
                self.write_files(work)
            yield work
            for saved in work.saved.values():
                saved.remove()

    def write_files(self, work):
        """Files of every format that a row loads, all of the same state."""
        described = self.start(work, self.wanted(work, self.case.cache[0]))
        formats = {said["loads"] for said in described.values() if not isinstance(said, RowFailed)}
        writers = {name: checkpoint_peers.writer_of(name, self.case.written_by) for name in sorted(formats)}
        self.start(work, [writer.key for writer in writers.values()])
        with self.progress.count("files to load", len(writers)) as advance:
            for name, writer in writers.items():
                work.saved[name] = data.Saved(work.path("saved", name))
                try:
                    self.processes[writer.key].ask("write", path=work.saved[name].path)
                except RowFailed as failed:
                    self.notes.append(f"{writer.name} could not write the {name} file that is loaded: {failed}")
                advance(1)
        self.notes.append(
            "load: files were written by " + ", ".join(f"{one.name} ({name})" for name, one in writers.items()) + "."
        )

    def about(self, source):
        system, disk = measure.file_system(source.folder)
        return {
            "summary": source.state.summary(),
            "tensors": source.state.tensors,
            "state_bytes": source.state.bytes,
            "file_bytes": {name: saved.file_bytes for name, saved in source.saved.items()},
            "file_system": system,
            "device": disk,
        }

    def caches(self, source):
        if source.kind == "load":
            return super().caches(source)
        if source.kind == "async":
            return ["staged"]
        return ["new", "replaced"] if self.case.overwrite else ["new"]

    def dtypes(self, source, cache):
        return ["+".join(self.case.dtypes)]

    def rows_for(self, source, cache):
        every = checkpoint_peers.ASYNC_ROWS if source.kind == "async" else checkpoint_peers.ROWS
        rows = [peer for peer in every if device.is_cuda(self.device) or peer.on_cpu]
        if source.kind == "async":
            return rows
        if source.kind == "load":
            return [peer for peer in rows if peer.loads]
        return [peer for peer in rows if peer.saves and (peer.replaces or cache != "replaced")]

    def missing(self, peer):
        return super().missing(peer) or peer.lacks()

    def find(self, key):
        return checkpoint_peers.find(key)

    def load_command(self, source):
        return {"kind": source.kind, "state": source.state.as_dict(), "engine": self.settings.engine}

    def verify_command(self, row):
        return {"path": self.path_of(row)}

    def touched_bytes(self, source):
        return TOUCHED_BYTES if device.is_cuda(self.device) else source.state.bytes + data.STATE_PIECE_BYTES

    def path_of(self, row):
        source = row.table.source
        if source.kind == "load":
            return source.saved[row.described["loads"]].path
        return source.path(row.key, row.described["saves"])

    def run(self, row):
        """What was saved is removed behind the run, and what was loaded is compared, both untimed."""
        source, cache = row.table.source, row.table.cache
        saved, resident = data.Saved(self.path_of(row)), None
        if source.kind == "load":
            resident = self.warmed(saved) if cache == "warm" else measure.drop(saved.files)
        else:
            row.process.ask("begin", path=saved.path, replacing=cache == "replaced")
        try:
            result = row.process.run(path=saved.path)
            row.process.ask("compare")
        finally:
            if source.kind != "load":
                saved.remove()
        result["peak_bytes"] += result.pop("staging_bytes", 0)
        return result | {"resident_before": resident}

    def take_limits(self, table, seconds):
        source, on_gpu = table.source, self.limits_process is not None
        if source.kind == "save":
            return limits.durable_writes(source.folder, source.state.bytes)
        if source.kind == "load":
            if table.cache == "cold":
                return limits.sequential_reads([max(source.files, key=os.path.getsize)])
            return super().take_limits(table, seconds)
        if not on_gpu:
            return {"memory_copy": limits.memory_copy(seconds)}
        asked = {"device": self.device, "seconds": seconds, "to_host": True}
        return {"pinned_copy_to_host": self.limits_process.ask("pinned_copy", **asked)}

    def limit_for(self, table, found):
        if table.source.kind == "save":
            return limits.write_limit(found)
        if table.cache == "cold":
            return limits.sequential_limit(found)
        return limits.warm_limit(found)

    def compared(self, table, limit, limit_name):
        """With what a user of mapped files has to beat: safetensors' row, which copies out of one."""
        found = super().compared(table, limit, limit_name)
        rates = {one["key"]: one["gb_per_s"]["median"] for one in found if one["gb_per_s"]}
        mapped = rates.get("safetensors") if table.source.kind == "load" else None
        for one in found:
            one["ratio_to_mapped"] = rates[one["key"]] / mapped if mapped and one["key"] in rates else None
        return found

    def summary(self, row):
        runs = row.runs
        return row.summary() | {
            "stated_bytes": max((run["stated_bytes"] for run in runs if run["stated_bytes"] is not None), default=None),
            **{name: measure.spread([run.get(name) for run in runs]) for name in ASYNC_TIMES},
        }


# ------------------------------------------------------------------------------------------------ in the row's process


class CheckpointRow(row.Row):
    """`tensors` is the state that is saved, or what a load fills."""

    def __init__(self, peer, kind, state, engine, device):
        super().__init__(peer, checkpoint_peers.find(peer), device)
        self.kind, self.state, self.engine = kind, data.State(**state), engine
        self.tensors, self.staging_bytes = None, 0

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
        self.get_ready()

    def get_ready(self):
        """The tensors, and on a GPU as much again in torch's hands: no row is timed for the driver's getting it."""
        self.tensors = (self.state.empty if self.kind == "load" else self.state.make)(self.device)
        if self.kind == "load":
            device.reserve(self.device, self.state.bytes)
        device.synchronize(self.device)

    def drop(self):
        """Gives the tensors' memory back to the system and the device: other rows' processes want as much."""
        self.tensors = None
        row.trim()
        device.release(self.device)

    def save(self, path):
        """Until it is on storage."""
        self.peer.save(self.tensors, path)
        if not self.peer.durable:
            data.Saved(path).sync()

    # Commands of the case:

    def write(self, path):
        self.get_ready()
        if self.kind == "load":
            self.tensors = self.state.make(self.device)
        try:
            self.construct()
            self.save(path)
        finally:
            self.close()
            self.drop()
        return {}

    def begin(self, path, replacing):
        """What a timed save finds: an older checkpoint, or staging memory that a save before it has made."""
        if self.kind == "async":
            self.begin_async(path)
        elif replacing:
            self.construct()
            self.save(path)
            self.close()
        return {}

    def begin_async(self, folder):
        before = measure.own_bytes(os.getpid())
        self.construct()
        self.peer.open(folder, self.state.bytes)
        self.peer.save(self.tensors, ASYNC_STEPS[0])
        saved = self.peer.wait()
        if not self.peer.prunes:
            data.Saved(saved).remove()
        self.staging_bytes = max(0, measure.own_bytes(os.getpid()) - before)

    def run(self, path):
        return {"save": self.run_save, "load": self.run_load, "async": self.run_async}[self.kind](path)

    def run_save(self, path):
        return self.timed(lambda: self.save(path))

    def run_load(self, path):
        return self.timed(lambda: self.peer.load(self.tensors, path))

    def timed(self, call):
        self.start_cpu_clock()
        started = time.perf_counter()
        self.construct()
        call()
        device.synchronize(self.device)
        return self.facts(time.perf_counter() - started, {})

    def run_async(self, folder):
        """`seconds`: in which the caller and its stream are kept; `background_s`: all until it is on storage."""
        served_before = self.peer.served()
        self.start_cpu_clock()
        started = time.perf_counter()
        self.peer.save(self.tensors, ASYNC_STEPS[1])
        device.wait_for_stream(self.device)
        stall_s = time.perf_counter() - started
        saved = self.peer.wait()
        if not self.peer.durable:
            data.Saved(saved).sync()
        found = self.facts(stall_s, served_before)
        found |= {"background_s": time.perf_counter() - started, "staging_bytes": self.staging_bytes}
        return found | self.take_steps(saved)

    def take_steps(self, saved):
        """Medians of training steps beside one more save until all of it is on storage, and alone, before and after.

        What they take of the processor's time is not the row's.
        """
        if not self.peer.prunes:
            data.Saved(saved).remove()
        used_before = measure.cpu_seconds()
        training = steps.TrainingSteps(self.device)
        alone = training.take_for(STEPS_S / 2)
        self.peer.save(self.tensors, ASYNC_STEPS[2])
        beside = training.take_while(lambda: not self.peer.is_done())
        self.peer.wait()
        alone += training.take_for(STEPS_S / 2)
        self.cpu_before += measure.cpu_seconds() - used_before
        return {"step_s": statistics.median(alone), "step_beside_s": statistics.median(beside)}

    def facts(self, seconds, served_before):
        return {
            "bytes": self.state.bytes,
            "seconds": seconds,
            "served": {path: count - served_before.get(path, 0) for path, count in self.peer.served().items()},
            "path": self.peer.way_in if self.kind == "load" else self.peer.way_out,
            "stated_bytes": self.peer.stated_bytes(),
        }

    def compare(self):
        """Every bit of what a timed load filled; then memory is given back."""
        try:
            if self.kind == "load":
                self.state.check(self.tensors)
        finally:
            self.drop()
        return {}

    def verify(self, path):
        """What was saved, as the format's own library reads it, or what was loaded: every bit of it."""
        self.get_ready()
        try:
            if self.kind == "async":
                self.verify_async(path)
            elif self.kind == "save":
                self.construct()
                self.save(path)
                self.tensors = self.state.empty("cpu")
                checkpoint_peers.STOCK[self.peer_class.saves]("cpu").load(self.tensors, path)
                self.state.check(self.tensors)
            else:
                self.construct()
                self.peer.load(self.tensors, path)
                self.state.check(self.tensors)
        finally:
            self.close()
            self.drop()
            if self.kind != "load":
                data.Saved(path).remove()
        return {"checked_bytes": self.state.bytes}

    def verify_async(self, folder):
        """The state changes as soon as `save` has returned: what is on storage must be what it was."""
        self.begin_async(folder)
        self.peer.save(self.tensors, ASYNC_STEPS[1])
        for tensor in self.tensors.values():
            tensor.zero_()
        self.peer.wait()
        self.state.check(checkpoint_peers.stock_tensors(folder, self.state.empty("cpu")))
