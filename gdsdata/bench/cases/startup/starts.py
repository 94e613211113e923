"""The starts of a training script: what it begins with, and one run of it."""

import json
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from gdsdata.bench.cases.startup import script
from gdsdata.bench.data import sources
from gdsdata.bench.data.made import sync
from gdsdata.bench.harness.process import RowFailed, checked, environment, without_interrupts
from gdsdata.bench.measure import system

SCRIPT = Path(script.__file__).resolve()
SLOWEST_S = 300


@dataclass
class Beginning(sources.CaseSource):
    """Files of a script: tokens, and a checkpoint of about `state_bytes`.

    Its tensors have `tensor_bytes`.
    """

    tokens: sources.Source
    state_bytes: int
    checkpoints: dict = field(default_factory=dict)  # {format: path}
    tensor_bytes: int = 0
    checksums: dict = field(default_factory=dict)  # of its tensors
    windows: set = field(default_factory=set)  # checksums of all that a batch may have
    dtype: ClassVar[str] = "int64"

    @property
    def kind(self):
        return f"checkpoint of {system.size_text(self.state_bytes)}" if self.state_bytes else "no checkpoint"

    @property
    def files(self):
        return [*self.tokens.files, *self.checkpoints.values()]

    def summary(self):
        return f"{self.tokens.summary()}; {self.kind} ({len(self.checksums):,} tensors)"


def windows_of(tokens, seq_len):
    """The checksum of each window of seq_len + 1 tokens, as int64, by plain reading."""
    values = np.fromfile(tokens.files[0], np.uint16)
    begins = range(0, len(values) - seq_len, seq_len)
    return {zlib.crc32(values[begin : begin + seq_len + 1].astype(np.int64).tobytes()) for begin in begins}


def write_checkpoints(source, formats, folder, seq_len, seed):
    """The same random state in each format, written by the format's own library."""
    model, optimizer = script.make_training(source.state_bytes, seq_len, "cpu")
    tensors = script.named_tensors(model, optimizer)
    random = np.random.Generator(np.random.SFC64(seed))
    for tensor in tensors.values():  # in [0, 1): moments are not negative
        tensor.copy_(torch.from_numpy(np.asarray(random.random(tuple(tensor.shape), np.float32))))
    source.tensor_bytes = sum(tensor.nbytes for tensor in tensors.values())
    source.checksums = script.checksums_of(model, optimizer)
    for name in formats:
        path = str(folder / f"tensor-state-{name}.bin")
        if name == "torch":
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        else:
            from safetensors.torch import save_file

            save_file(tensors, path)
        sync(path)
        source.checkpoints[name] = path


class Script:
    """A row's scripts, a process each, in place of the RowProcess of other cases."""

    def __init__(self, log, key, program):
        self.log, self.key, self.program = log, key, program

    def send(self, do, told, **_):
        self.told = told | {"row": self.key}

    def receive(self):
        name = self.program.name or type(self.program).__name__
        return {"key": self.key, "name": name, "setting": self.program.setting}

    def ask(self, do, runs=0, check=None, **_):
        """`verify` makes the runs before the timed ones.

        Nothing is kept from run to run, so nothing is prepared.
        """
        return {"checked_bytes": sum(check(self.start()) for _ in range(runs))}

    def dismiss(self):
        pass

    def end(self, within_s=0):
        pass

    def start(self):
        """One run: the script's answer, and `spawned`, when it was started, on the same clock."""
        given = environment()
        given.pop("PYTHONDONTWRITEBYTECODE", None)  # An installed package has its modules compiled.
        command = [sys.executable, str(SCRIPT), json.dumps(self.told)]
        spawned = time.monotonic()
        with without_interrupts():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, env=given)
        with process:  # which closes the pipe: workers would keep it open for seconds
            try:
                output, _ = process.communicate(timeout=SLOWEST_S)
            except subprocess.TimeoutExpired:
                raise RowFailed(f"no first step within {SLOWEST_S} s: the script was ended") from None
            finally:
                process.kill()  # if it has not ended
        try:
            answer = json.loads(output)
        except ValueError:
            raise RowFailed(f"the script ended with {process.returncode} before its last part; see rows.log") from None
        return checked(answer, self.log) | {"spawned": spawned}
