"""Check that every parser reads a damaged file within its bounds, or refuses it with its path.

    python tests/fuzz.py all --seconds 600         # --help lists single targets
    python tests/fuzz.py tar --seconds 60 --seed 7 --corpus FOLDER --findings FOLDER
    python tests/fuzz.py tar --repeat FOLDER       # repeats a finding, as its line says

An input is a folder of small files. The first inputs are written by the tests' own writers, and
others are in tests/corpus/TARGET (`fuzz_corpus.py`). An input that reaches a new line of the parser
is kept and changed further. Another process reads the
inputs, so that crashes and hangs are found with their input too. Findings are:

- an exception that is no refusal, or a refusal without the path;
- a crash;
- an extent outside its file;
- a file, a module or a program that the parser has no reason to open, import or run;
- an object outside the prefix that was listed, or an error that shows a secret;
- more than a second of the processor, or 64 MiB touched, or 4 GiB reserved, for an input of at most
  256 KiB a file.

To add a target, write a `Target` and name it in `TARGETS`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_changes import mutated
from fuzz_guard import Guard, Lines
from fuzz_target import MTIME_NS, Files, Target
from fuzz_targets import TARGETS

import gdsdata
from gdsdata.errors import CorruptData, IoError

KEPT = Path(__file__).resolve().parent / "corpus"

_MOST_SECONDS = 1.0  # of the processor, for one input
_TOO_LONG = "takes too long"
_HANGS_AFTER_S = 120.0  # by the clock: others may use the processor
_BEGINS_AFTER_S = 300.0  # by the clock: the seeds are made first
_MOST_TOUCHED_BYTES = 64 * 2**20
_MOST_RESERVED_BYTES = 4 * 2**30
_LARGEST_KEPT_BYTES = 2**15  # kept inputs are changed often, and should be read quickly

# Python imports these when it first meets them: in names in zip files, and in JSON in bytes.
_ENCODINGS = ("cp437", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-16", "utf-32", "utf-8-sig")

# ---------------------------------------------------------------------------------------------------- one input


def outcome(target: Target, folder: Path, guard: Guard) -> str | None:
    """Return the fault in how ``target`` reads the input in ``folder``, or None."""
    touched, cpu_s = _peak_bytes(), time.process_time()
    wrong = None
    try:
        with guard:
            target.read(folder)
    except BaseException as error:
        if not _is_refusal(error, target, folder):
            wrong = _described(error)
    cpu_s, touched = time.process_time() - cpu_s, _peak_bytes() - touched
    if guard.seen:
        wrong = f"not a parser's business: {guard.seen}"
    if cpu_s > _MOST_SECONDS:
        wrong = wrong or f"{_TOO_LONG}: {cpu_s:.1f} s of the processor"
    if touched > _MOST_TOUCHED_BYTES:
        wrong = wrong or f"takes too much: {touched / 2**20:.0f} MiB of memory"
    return wrong


def _is_refusal(error: BaseException, target: Target, folder: Path) -> bool:
    """Return whether the target may raise this error, and it names what is refused."""
    named = target.named or (str(folder),)
    if isinstance(error, (CorruptData, IoError)):
        return error.path.startswith(named)
    if isinstance(error, ValueError) and not isinstance(error, target.refusals):
        return type(error) is ValueError and any(name in str(error) for name in named)
    return isinstance(error, (FileNotFoundError, *target.refusals))


def _described(error: BaseException) -> str:
    """Describe the error and the line in gdsdata that raised it."""
    if isinstance(error, (CorruptData, IoError)):
        return f"{type(error).__name__} without a path: {error}"
    package = Path(gdsdata.__file__).parent  # its checkout has the same name
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if package in Path(frame.filename).parents]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside gdsdata"
    return f"{type(error).__name__} at {where}: {error!s:.300}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_input(files: Files, folder: Path) -> None:
    """Make ``files`` the only content of ``folder``."""
    for entry in os.scandir(folder):
        if entry.name not in files:
            os.unlink(entry.path)
    for name, data in files.items():
        (folder / name).write_bytes(data)
        os.utime(folder / name, ns=(MTIME_NS, MTIME_NS))


def read_input(folder: Path) -> Files:
    return {entry.name: Path(entry.path).read_bytes() for entry in os.scandir(folder) if entry.is_file()}


# ------------------------------------------------------------------------------------------- a process, and its keeper


@dataclass
class Report:
    """The results of a target's inputs. ``findings``: each fault, with the folder of its input."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    lines: int = 0
    kept: int = 0
    findings: dict[str, Path] = field(default_factory=dict)

    def __str__(self) -> str:
        rate = self.inputs / max(self.seconds, 1e-9)
        text = f"{self.target}: {self.inputs} inputs, {rate:.0f}/s, {self.lines} lines reached, {self.kept} inputs kept"
        for wrong, folder in self.findings.items():
            text += f"\n  {wrong}\n    python tests/fuzz.py {self.target} --repeat {folder}"
        return text + (f"\n  {len(self.findings)} findings" if self.findings else ", no findings")


def seeds_of(target: Target, folder: Path) -> list[Files]:
    """Return the inputs that the target's writers write."""
    seeds = []
    for i, write in enumerate(target.seeds):
        (folder / str(i)).mkdir(parents=True)
        write(folder / str(i))
        seeds.append(read_input(folder / str(i)))
    return seeds


def read_before(target: Target, inputs: Sequence[Files], folder: Path) -> None:
    """Read inputs without a guard: imports and first allocations are not charged to one of them."""
    for name in _ENCODINGS:
        "".encode(name)
    for files in inputs:
        write_input(files, folder)
        with contextlib.suppress(ValueError, FileNotFoundError, IoError, *target.refusals):
            target.read(folder)


def inputs_of(target: Target, corpus: Path) -> list[Files]:
    """Return the inputs that a corpus has for a target."""
    folder = corpus / target.name
    return [read_input(one) for one in sorted(folder.iterdir())] if folder.is_dir() else []


def fuzz(
    target: Target, seconds: float, seed: int, work: Path, findings: Path, corpus: Path | None, run: Any
) -> Report:
    """Read changed inputs for ``seconds``, in this process. ``run.value`` counts them."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "gdsdata: ")  # gdsdata's own warnings
    warnings.filterwarnings("ignore", "Data type alias 'a'", DeprecationWarning)  # a dtype that NumPy still takes
    np.seterr(all="raise")
    dice = random.Random(seed)
    current = work / "input"
    shutil.rmtree(work, ignore_errors=True)
    current.mkdir(parents=True)
    inputs = seeds_of(target, work / "seeds")
    read_before(target, inputs, current)
    report, lines, guard = Report(target.name), Lines(target.modules), Guard(work)
    for known in filter(None, (KEPT, corpus)):
        inputs += inputs_of(target, known)
    untried = list(inputs)
    _limit_memory()
    began_s = time.monotonic()
    while untried or time.monotonic() - began_s < seconds:
        if untried:
            files = untried.pop()
        else:
            some = inputs[-16:] if dice.random() < 0.5 else inputs  # prefer the latest inputs
            files = mutated(dice.choice(some), inputs, target.tokens, dice)
            if dice.random() < 0.8:
                files = target.mend(files)
        write_input(files, current)
        reached = lines.reached
        with lines:
            wrong = outcome(target, current, guard)
        if wrong is not None and wrong.startswith(_TOO_LONG):  # counting lines can take most of it
            wrong = outcome(target, current, guard)
        report.inputs += 1
        run.value += 1
        if wrong:
            _save(report, wrong, files, findings)
        elif lines.reached > reached and sum(map(len, files.values())) <= _LARGEST_KEPT_BYTES:
            inputs.append(files)
            if corpus is not None:
                store(files, corpus / target.name)
    report.seconds, report.lines, report.kept = time.monotonic() - began_s, lines.reached, len(inputs)
    return report


def _limit_memory() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the memory in use now
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + _MOST_RESERVED_BYTES, resource.RLIM_INFINITY))


def _save(report: Report, wrong: str, files: Files, findings: Path) -> None:
    """Store the input of the first finding of its kind and place."""
    kind = wrong.split(": ")[0]
    if not any(known.split(": ")[0] == kind for known in report.findings):
        report.findings[wrong] = store(files, findings / report.target)


def store(files: Files, folder: Path) -> Path:
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    (folder / digest).mkdir(parents=True, exist_ok=True)
    write_input(files, folder / digest)
    return folder / digest


_processes = multiprocessing.get_context("forkserver")  # `helpers` has had it import torch


def watched(target: Target, seconds: float, seed: int, findings: Path, corpus: Path | None) -> Report:
    """Run `fuzz` in another process. After a crash or a hang, note a finding and start the next."""
    total = Report(target.name)
    work = Path(tempfile.mkdtemp(prefix="gdsdata-fuzz-", dir=_memory()))
    try:
        while total.seconds < seconds:
            _add(total, _one_process(target, seconds - total.seconds, seed, work, findings, corpus))
            seed += 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return total


def _one_process(target: Target, seconds: float, seed: int, work: Path, findings: Path, corpus: Path | None) -> Report:
    run = _processes.Value("q", 0)
    receiver, sender = _processes.Pipe(duplex=False)
    known = target.name if target.name in TARGETS else target  # a target cannot be pickled
    arguments = (sender, known, seconds, seed, work, findings, corpus, run)
    process = _processes.Process(target=_answer, args=arguments, daemon=True)
    process.start()
    sender.close()
    began_s = moved_s = time.monotonic()
    inputs, wrong = 0, None
    while not receiver.poll(0.2):
        if run.value != inputs:
            inputs, moved_s = run.value, time.monotonic()
        elif time.monotonic() - moved_s > (_HANGS_AFTER_S if inputs else _BEGINS_AFTER_S):
            wrong = f"hangs: still runs after {_HANGS_AFTER_S:.0f} s"
            process.kill()
            break
    try:
        report = receiver.recv()
    except EOFError:
        process.join()
        if not inputs and not (inputs := run.value):
            raise RuntimeError(f"{target.name}: its process ended before it had read an input") from None
        report = Report(target.name, inputs, time.monotonic() - began_s)
        wrong = wrong or f"crashes: {_name_of_signal(process.exitcode)}"
        _save(report, wrong, read_input(work / "input"), findings)
    process.join()
    return report


def _memory() -> str | None:
    """Return a folder in memory, if there is one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _answer(sender: Any, target: str | Target, *arguments: Any) -> None:
    sender.send(fuzz(TARGETS[target] if isinstance(target, str) else target, *arguments))


def _name_of_signal(exit_code: int | None) -> str:
    return signal.Signals(-exit_code).name if exit_code is not None and exit_code < 0 else f"exit code {exit_code}"


def _add(total: Report, more: Report) -> None:
    total.inputs, total.seconds = total.inputs + more.inputs, total.seconds + more.seconds
    total.lines, total.kept = max(total.lines, more.lines), max(total.kept, more.kept)
    known = {wrong.split(": ")[0] for wrong in total.findings}
    total.findings |= {wrong: at for wrong, at in more.findings.items() if wrong.split(": ")[0] not in known}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=[*TARGETS, "all"])
    parser.add_argument("--seconds", type=float, default=60.0, help="time for each target")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--corpus", type=Path, help="folder of inputs that reach new lines; grows")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--repeat", type=Path, help="read this input once, here, with the whole traceback")
    given = parser.parse_args(arguments)
    if given.repeat is not None:
        with tempfile.TemporaryDirectory() as folder:  # a parser may write beside its input
            write_input(read_input(given.repeat), Path(folder))
            TARGETS[given.target].read(Path(folder))
        print("it was read")
        return 0
    found = 0
    for name in TARGETS if given.target == "all" else [given.target]:
        print(f"{name}: seed {given.seed}", end="\r", flush=True)
        report = watched(TARGETS[name], given.seconds, given.seed, given.findings.resolve(), given.corpus)
        print(report, flush=True)
        found += len(report.findings)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
