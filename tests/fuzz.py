"""Check that every parser reads a damaged file within its bounds, or refuses it with its path.

    python tests/fuzz.py all --seconds 600         # --help lists single targets
    python tests/fuzz.py tar --seconds 60 --seed 7 --corpus FOLDER --findings FOLDER
    python tests/fuzz.py tar --repeat FOLDER       # repeats a finding, as its line says

An input is a folder of small files. The first inputs are written by the tests' own writers. An
input that reaches a new line of the parser is kept and changed further. Another process reads the
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
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy as np
from fuzz_target import MTIME_NS, Files, Target
from fuzz_targets import TARGETS

import gdsdata
from gdsdata.errors import CorruptData, IoError

_MOST_SECONDS = 1.0  # of the processor, for one input
_TOO_LONG = "takes too long"
_HANGS_AFTER_S = 120.0  # by the clock: others may use the processor
_BEGINS_AFTER_S = 300.0  # by the clock: the seeds are made first
_MOST_TOUCHED_BYTES = 64 * 2**20
_MOST_RESERVED_BYTES = 4 * 2**30
_LARGEST_INPUT_BYTES = 2**18
_LARGEST_KEPT_BYTES = 2**15  # kept inputs are changed often, and should be read quickly

# Python imports these when it first meets them: in names in zip files, and in JSON in bytes.
_ENCODINGS = ("cp437", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "utf-16", "utf-32", "utf-8-sig")

# ------------------------------------------------------------------------------------------------ changes of bytes

_WIDTHS = (1, 2, 4, 8)
_NUMBERS = [n for bits in (7, 8, 15, 16, 24, 31, 32, 62, 63, 64) for n in (2**bits - 1, 2**bits, 2**bits + 1)]
_NUMBERS += [*range(17), 64, 65, 100, 255, 511, 512, 513, 4095, 4096, 4097, 10**18, 10**19, 10**30]
_DIGITS = frozenset(b"0123456789")
# A range that is repeated this often becomes deep if it nests, and long if it does not.
_MANY_TIMES = (2, 10, 100, 1000, 20_000)


def mutated(files: Files, others: Sequence[Files], tokens: Sequence[bytes], dice: random.Random) -> Files:
    """Make one or a few changes to one or two files, with ranges of ``others`` among them."""
    changed = dict(files)
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        name = dice.choice(sorted(changed))
        data = bytearray(changed[name])
        change = dice.choice(_CHANGES)
        change(data, dice, dice.choice(others).get(name, b""), tokens)
        changed[name] = bytes(data[:_LARGEST_INPUT_BYTES])
    return changed


def _flip(data: bytearray, dice: random.Random, *_: Any) -> None:
    if data:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _set_byte(data: bytearray, dice: random.Random, *_: Any) -> None:
    if data:
        data[dice.randrange(len(data))] = dice.randrange(256)


def _set_number(data: bytearray, dice: random.Random, *_: Any) -> None:
    """Write a small number, a limit, the file's own size, or a number near the old one."""
    width = dice.choice(_WIDTHS)
    if len(data) < width:
        return
    at, order = dice.randrange(len(data) - width + 1), dice.choice(("little", "big"))
    there = int.from_bytes(data[at : at + width], order)
    value = dice.choice((dice.choice(_NUMBERS), len(data), there + dice.randint(-16, 16), -dice.choice(_NUMBERS)))
    data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, order)


def _set_digits(data: bytearray, dice: random.Random, *_: Any) -> None:
    """Replace a number in text, such as JSON or a header."""
    places = [i for i, octet in enumerate(data[:65536]) if octet in _DIGITS]
    if not places:
        return
    begin = end = dice.choice(places)
    while begin and data[begin - 1] in _DIGITS:
        begin -= 1
    while end < len(data) and data[end] in _DIGITS:
        end += 1
    value = dice.choice((dice.choice(_NUMBERS), int(data[begin:end][:18]) + dice.randint(-2, 2)))
    text = dice.choice((b"%d", b"%o", b"%d.5", b"-%d")) % abs(value)
    # Either as wide as before, for fields of fixed width, or as long as the new number is.
    data[begin:end] = text.rjust(end - begin, b"0")[: end - begin] if dice.random() < 0.5 else text


def _cut_off(data: bytearray, dice: random.Random, *_: Any) -> None:
    del data[dice.randrange(len(data) + 1) :]


def _range(data: bytes | bytearray, dice: random.Random) -> tuple[int, int]:
    begin = dice.randrange(len(data) + 1)
    return begin, min(len(data), begin + dice.choice((1, 2, 4, 8, 16, 64, 512, dice.randrange(1 + len(data)))))


def _cut_out(data: bytearray, dice: random.Random, *_: Any) -> None:
    begin, end = _range(data, dice)
    del data[begin:end]


def _insert(data: bytearray, dice: random.Random, *_: Any) -> None:
    at = dice.randrange(len(data) + 1)
    count = dice.choice((1, 2, 4, 8, 100, 512))
    data[at:at] = dice.choice((dice.randbytes(count), bytes(count), b"\xff" * count))


def _repeat(data: bytearray, dice: random.Random, *_: Any) -> None:
    begin, end = _range(data, dice)
    times = min(dice.choice(_MANY_TIMES), _LARGEST_INPUT_BYTES // max(1, end - begin))
    data[end:end] = data[begin:end] * times


def _splice(data: bytearray, dice: random.Random, other: bytes, *_: Any) -> None:
    begin, end = _range(other, dice)
    at = dice.randrange(len(data) + 1)
    data[at : at + dice.choice((0, end - begin))] = other[begin:end]


def _put_token(data: bytearray, dice: random.Random, other: bytes, tokens: Sequence[bytes]) -> None:
    token, times = dice.choice(tokens or (b"\0",)), dice.choice((1, 1, 1, 1, *_MANY_TIMES))
    at = dice.randrange(len(data) + 1)
    data[at : at + dice.choice((0, len(token)))] = token * min(times, 1 + _LARGEST_INPUT_BYTES // len(token))


_CHANGES: list[Callable[..., None]] = [
    *(_flip, _set_byte, _set_number, _set_number, _set_digits, _set_digits),
    *(_cut_off, _cut_out, _insert, _repeat, _splice, _put_token, _put_token),
]

# --------------------------------------------------------------------------------------------- what a parser reaches


class Lines:
    """The lines of some modules that have run, in any thread.

    Code whose lines have all run is not traced again, so a parser soon runs nearly at full speed.
    """

    def __init__(self, modules: Sequence[ModuleType]) -> None:
        self._files = {module.__file__ for module in modules}
        self._missing: dict[CodeType, set[int]] = {}
        self.reached = 0

    def __enter__(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename not in self._files:
            return None
        missing = self._missing.get(code)
        if missing is None:
            missing = self._missing[code] = {line for _, _, line in code.co_lines() if line is not None}
        return self._line if missing else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            missing = self._missing[frame.f_code]
            if frame.f_lineno in missing:
                missing.discard(frame.f_lineno)
                self.reached += 1
        return self._line


class Escaped(BaseException):
    """Reports an action that no parser needs. It is no Exception, so no parser catches it."""


class Guard:
    """Refuses programs, imports, code, and files outside the input's folder while a parser runs."""

    _FORBIDDEN = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "import", "exec", "pty.", "webbrowser.")
    # `memory_budget` reads these before row groups are decoded.
    _MEMORY = ("/proc/meminfo", "/proc/self/mountinfo", "/proc/self/cgroup", "/sys/fs/cgroup/")
    _WITHIN_THE_FOLDER = ("open", "os.mkdir", "os.rename", "os.remove", "os.scandir", "os.listdir")

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._armed = False
        self.seen: str | None = None
        sys.addaudithook(self._hook)  # stays until the process ends

    def __enter__(self) -> None:
        self.seen, self._armed = None, True

    def __exit__(self, *_: object) -> None:
        self._armed = False

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event in self._WITHIN_THE_FOLDER:
            within = (self._folder, *self._MEMORY)
            wrong = not isinstance(arguments[0], int) and not os.fsdecode(arguments[0]).startswith(within)
        else:
            wrong = event.startswith(self._FORBIDDEN)
        if wrong:
            self.seen = f"{event} {arguments!r:.200}"  # seen even if the parser caught the exception
            raise Escaped(self.seen)


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
    for name in _ENCODINGS:
        "".encode(name)
    for files in inputs:  # imports and first allocations are not charged to an input
        write_input(files, current)
        with contextlib.suppress(ValueError, FileNotFoundError, IoError, *target.refusals):
            target.read(current)
    report, lines, guard = Report(target.name), Lines(target.modules), Guard(work)
    if corpus is not None and (corpus / target.name).is_dir():
        inputs += [read_input(folder) for folder in sorted((corpus / target.name).iterdir())]
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
                _store(files, corpus / target.name)
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
        report.findings[wrong] = _store(files, findings / report.target)


def _store(files: Files, folder: Path) -> Path:
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
