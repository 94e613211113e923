"""case=startup: from the start of a training script's process to its first optimizer step, by part.

Each run is a process of its own (`startup_peers`, as a script), which notes when each part was
over; what its parent adds is when it was started. A source is a file of tokens with a checkpoint of
some size, or with none. The row `floor` is the same script without a library and without files. Of
every run the first batch and the restored tensors are compared with what was written, while its
clock stands. A run that is not timed comes before: it leaves Python's compiled modules in their
folders, and the files of all libraries in the page cache.
"""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from gdsdata.bench import case, data, measure, startup_peers
from gdsdata.bench.io import ended_in_order
from gdsdata.bench.own_folder import OwnFolder
from gdsdata.bench.process import RowFailed, without_interrupts
from gdsdata.bench.startup_peers import OWN_PARTS, PARTS

FOLDER = "startup"  # within data.folder
SCRIPT = Path(startup_peers.__file__).resolve()
SLOWEST_S = 300


@dataclass
class Beginning:
    """What a script starts from: tokens, and a checkpoint of about `state_bytes`, whose tensors have `tensor_bytes`."""

    tokens: data.Source
    state_bytes: int
    checkpoints: dict = field(default_factory=dict)  # {format: path}
    tensor_bytes: int = 0
    checksums: dict = field(default_factory=dict)  # of its tensors
    windows: set = field(default_factory=set)  # checksums of all that a batch may have

    @property
    def kind(self):
        return f"checkpoint of {measure.size_text(self.state_bytes)}" if self.state_bytes else "no checkpoint"

    @property
    def files(self):
        return [*self.tokens.files, *self.checkpoints.values()]

    @property
    def file_bytes(self):
        return sum(map(os.path.getsize, self.files))


def windows_of(tokens, seq_len):
    """The checksum of each window of seq_len + 1 tokens, as int64, by plain reading."""
    values = np.fromfile(tokens.files[0], np.uint16)
    begins = range(0, len(values) - seq_len, seq_len)
    return {zlib.crc32(values[begin : begin + seq_len + 1].astype(np.int64).tobytes()) for begin in begins}


def write_checkpoints(source, formats, folder, seq_len, seed):
    """The same random state in each format, written by the format's own library."""
    model, optimizer = startup_peers.make_training(source.state_bytes, seq_len, "cpu")
    tensors = startup_peers.named_tensors(model, optimizer)
    random = np.random.Generator(np.random.SFC64(seed))
    for tensor in tensors.values():  # in [0, 1): moments are not negative
        tensor.copy_(torch.from_numpy(np.asarray(random.random(tuple(tensor.shape), np.float32))))
    source.tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())
    source.checksums = startup_peers.checksums_of(model, optimizer)
    for name in formats:
        path = str(folder / f"tensor-state-{name}.bin")
        if name == "torch":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        else:
            from safetensors.torch import save_file

            save_file(tensors, path)
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
        source.checkpoints[name] = path


class Script:
    """A row's scripts, a process each; it stands where other cases have one process for all runs (`RowProcess`)."""

    def __init__(self, log):
        self.log = log

    def send(self, do, peer, told, **_):
        self.told = told | described(peer)

    def receive(self):
        return {name: self.told["row"][name] for name in ("key", "name", "setting")}

    def ask(self, do, runs=0, check=None, **_):
        """Nothing is kept from run to run, so that there is nothing to prepare; `verify` is the runs before them."""
        checked = {"checked_bytes": 0}
        for _ in range(runs):
            checked["checked_bytes"] += check(self.start())
        return checked

    def dismiss(self):
        pass

    def end(self, within_s=0):
        pass

    def start(self):
        """One run: what the script found, and `spawned`, when it was started, on the same clock."""
        package_parent = str(SCRIPT.parents[2])
        paths = [package_parent, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its modules compiled
        command = [sys.executable, str(SCRIPT), json.dumps(self.told)]
        spawned = time.monotonic()
        with without_interrupts():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, env=environment)
        try:
            output, _ = process.communicate(timeout=SLOWEST_S)
        except BaseException as error:
            process.kill()
            process.wait()
            process.stdout.close()  # not read to its end, which its workers would keep open for seconds
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise RowFailed(f"no first step within {SLOWEST_S} s: the script was ended") from None
        try:
            answer = json.loads(output)
        except ValueError:
            raise RowFailed(f"the script ended with {process.returncode} before its last part; see rows.log") from None
        if "error" in answer:
            self.log.write(answer["trace"].encode() + b"\n")
            self.log.flush()
            raise RowFailed(answer["error"])
        return answer | {"spawned": spawned}


def described(key):
    """What a script is told of its program."""
    module, _, name = key.partition(":") if ":" in key else (None, "", "")
    found = getattr(importlib.import_module(module), name)() if module else program_of(key)
    row = {"key": key, "name": found.name or name or key, "setting": found.setting}
    home = {"module": module, "class": name or type(found).__name__, "workers": found.workers}
    return {"row": row, "way": found.way, **home}


def program_of(key):
    """Of a key of this package: `dataloader_4` has 4 workers, whichever are measured."""
    digits = key.removeprefix("dataloader_").partition("_")[0]
    return case.find(key, startup_peers.programs([int(digits)] if digits.isdecimal() else [0]))


class Startup(case.Case):
    def measure(self):
        self.root = data.default_folder()
        if self.settings.data.folder:
            self.root = Path(self.settings.data.folder).expanduser()
        self.root.mkdir(parents=True, exist_ok=True)
        with ended_in_order(), OwnFolder(self.root / FOLDER) as own:
            self.own = own
            results = super().measure()
        if own.strangers:
            results["notes"].append(f"{own.path} stays: others put {', '.join(own.strangers)} there meanwhile.")
        return results

    def process(self, name):
        if name == "limits":
            return super().process(name)
        return self.processes.setdefault(name, Script(self.log))

    # ---- sources and rows

    def sources(self):
        settings = self.settings.data
        with self.progress.bytes("data: tokens", settings.size_bytes) as advance:
            tokens = data.source_for("tokens", settings, advance)
        with self.progress.step("checksums: tokens"):
            windows = windows_of(tokens, settings.seq_len)
        for state_bytes in sorted(set(self.case.state_bytes)):
            source = Beginning(tokens, state_bytes, windows=windows)
            if state_bytes:
                formats = self.formats(state_bytes)
                name = f"case.state_bytes=[{state_bytes}]"
                data.need_space(self.own.path, name, len(formats) * state_bytes, "case.state_bytes=")
                with self.progress.step(f"data: {source.kind}"):
                    write_checkpoints(source, formats, self.own.path, settings.seq_len, self.case.seed)
            yield source
            for path in source.checkpoints.values():
                Path(path).unlink(missing_ok=True)

    def about(self, source):
        system, disk = measure.file_system(source.files[0])
        return {
            "summary": f"{source.tokens.summary()}; {source.kind} ({len(source.checksums):,} tensors)",
            "files": len(source.files),
            "first_file": source.files[0],
            "file_bytes": source.file_bytes,
            "state_bytes": source.state_bytes,
            "tensors": len(source.checksums),
            "batch_size": self.case.batch_size,
            "file_system": system,
            "device": disk,
        }

    def dtypes(self, source, cache):
        return ["int64"]

    def rows_of(self, state_bytes):
        return [one for one in startup_peers.programs(self.case.workers) if state_bytes or not one.needs_state]

    def rows_for(self, source, cache):
        return self.rows_of(source.state_bytes)

    def formats(self, state_bytes):
        """Of the checkpoints that the wanted rows restore."""
        keys = self.case.rows or [one.key for one in self.rows_of(state_bytes)]
        rows = map(self.find, keys)
        return list(dict.fromkeys(row.state_format for row in rows if row.restores and not self.missing(row)))

    def wanted(self, source, cache):
        """The floor too, whichever rows are wanted: all others are measured from there."""
        keys = super().wanted(source, cache)
        return keys if "floor" in keys else ["floor", *keys]

    def find(self, key):
        return case.find(key, startup_peers.programs(self.case.workers))

    def load_command(self, source):
        told = {
            "tokens": source.tokens.files[0],
            "seq_len": self.settings.data.seq_len,
            "batch_size": self.case.batch_size,
            "state_bytes": source.state_bytes,
            "files": source.checkpoints,
            "device": self.device,
            "seed": self.case.seed,
            "engine": self.settings.engine,
        }
        return {"told": told}

    # ---- runs

    def verify(self, source, rows, loaded):
        self.warmed(source)
        super().verify(source, rows, loaded)
        if not os.path.exists(importlib.util.cache_from_source(str(SCRIPT.parents[1] / "dataset.py"))):
            self.notes.append(
                f"Python could not keep gdsdata's compiled modules in {SCRIPT.parents[1]}: each start compiled them."
            )

    def verify_command(self, row):
        check = functools.partial(self.check, row.table.source, row.key)
        return {"runs": self.case.warm_up, "check": check}

    def check(self, source, key, answer):
        """Bytes that were compared. Raises RowFailed for a batch that is none, and for tensors not as written."""
        self.check_batch(source, key, answer)
        if source.state_bytes and key != "floor":
            wrong = [name for name, due in source.checksums.items() if answer["restored"].get(name) != due]
            if wrong:
                raise RowFailed(
                    f"restore: {len(wrong)} of {len(source.checksums)} tensors are not what the checkpoint holds, the "
                    f"first of them {wrong[0]!r}"
                )
        return self.bytes_of(source, key)

    def bytes_of(self, source, key):
        """That a script reads."""
        batch_bytes = self.case.batch_size * (self.settings.data.seq_len + 1) * 2
        return 0 if key == "floor" else batch_bytes + source.tensor_bytes

    def check_batch(self, source, key, answer):
        """Each of the batch's windows has to be one of the file's."""
        due = [self.case.batch_size, self.settings.data.seq_len + 1]
        batch, there = answer["batch"], torch.device(self.device).type
        if batch["shape"] != due or batch["dtype"] != "torch.int64" or batch["device"] != there:
            raise RowFailed(
                f"first batch: {batch['dtype']} {batch['shape']} on {batch['device']}, torch.int64 {due} on {there} "
                "were due"
            )
        wrong = sum(window not in source.windows for window in answer["windows"])
        if wrong and key != "floor":
            raise RowFailed(f"first batch: {wrong} of its {due[0]} windows are none of {source.tokens.files[0]}")

    def touched_bytes(self, source):
        return 0

    def take_limits(self, table, seconds):
        return {}  # the floor is what there is

    def limit_for(self, table, found):
        return None, "the row `floor`"

    def run(self, row):
        source = row.table.source
        resident = self.warmed(source) if row.table.cache == "warm" else measure.drop(source.files)
        clock, machine, here = time.monotonic(), measure.machine_cpu_seconds(), measure.cpu_seconds()
        answer = row.process.start()
        used = measure.cpu_seconds() - here  # of the script and its workers, for they have ended
        others = max(0.0, measure.machine_cpu_seconds() - machine - used) / (time.monotonic() - clock)
        checked_bytes = row.checked["checked_bytes"] + self.check(source, row.key, answer)
        row.checked = {"checked_bytes": checked_bytes}
        parts = parts_of(answer)
        to_batch = sum(seconds for name, seconds in parts.items() if name != "first_step")
        return {
            "bytes": self.bytes_of(source, row.key),
            "seconds": sum(parts.values()),
            "parts_s": parts,
            "to_first_batch_s": to_batch,
            "own_s": sum(parts[name] for name in OWN_PARTS if name in parts),
            "resident_before": resident,
            "cpu_seconds": used - answer["stood_cpu_s"],
            "others_cores": others,
            "peak_bytes": answer["peak_bytes"],
            "served": answer["served"],
            "path": row.process.told["way"],
        }

    def summary(self, row):
        served = {}
        for run in row.runs:
            for path, count in run["served"].items():
                served[path] = served.get(path, 0) + count
        names = [name for name in PARTS if row.runs and name in row.runs[0]["parts_s"]]
        spreads = {name: measure.spread([run[name] for run in row.runs]) for name in OF_RUNS}
        return {
            "data": row.table.source.kind,
            "dtype": row.table.dtype,
            "cache": row.table.cache,
            **row.described,
            "verified": bool(row.checked) and row.error is None,
            "error": row.error,
            **row.checked,
            **spreads,
            "parts_s": {name: measure.spread([run["parts_s"][name] for run in row.runs]) for name in names},
            "gb_per_s": None,
            "peak_bytes": max((run["peak_bytes"] for run in row.runs), default=None),
            "path": case.path_text(served, row.runs[0]["path"] if row.runs else ""),
            "served_bytes": served,
            "runs": row.runs,
        }

    def compared(self, table, limit, limit_name):
        """What each row is above the floor: of each turn, for a busy moment is the same for both."""
        rows = super().compared(table, limit, limit_name)
        floors = next((row["runs"] for row in rows if row["key"] == "floor"), [])
        for row in rows:
            pairs = list(zip(row["runs"], floors, strict=False))
            for name, of in (("above_floor_s", "seconds"), ("batch_above_floor_s", "to_first_batch_s")):
                row[name] = measure.spread([run[of] - floor[of] for run, floor in pairs])
        return rows


OF_RUNS = ("seconds", "to_first_batch_s", "own_s", "cpu_seconds", "resident_before")


def parts_of(answer):
    """Seconds of each part, from when they were over."""
    parts, before = {}, answer["spawned"]
    for name, over in answer["over"].items():
        parts[name], before = over - before, over
    return parts
