"""Damaged files for every parser, and the fuzzer itself: it finds planted faults."""

import signal
import subprocess
import time
from pathlib import Path

import fuzz
import fuzz_corpus
import numpy as np
import pytest
from fuzz import Report, outcome, watched, write_input
from fuzz_changes import LARGEST_INPUT_BYTES, mutated
from fuzz_guard import Guard
from fuzz_target import Target
from fuzz_targets import TARGETS
from helpers import MIB, in_new_process

from gdsdata.errors import CorruptData

SEED = 20
SECONDS_EACH = 0.15  # besides the seeds and the corpus


class Count:
    """Stands for the number that two processes share."""

    value = 0


def _each_target(folder: Path) -> list[Report]:
    work, findings = folder / "work", folder / "findings"
    return [fuzz.fuzz(target, SECONDS_EACH, SEED, work, findings, None, Count()) for target in TARGETS.values()]


@pytest.mark.timeout(300)  # 13 s of the processor, which others may use
def test_damaged_files_are_read_within_their_bounds_or_refused_with_their_path(tmp_path):
    reports = in_new_process(_each_target, tmp_path, timeout_s=280)
    assert [report.target for report in reports] == list(TARGETS)
    for report in reports:
        kept = len(fuzz.inputs_of(TARGETS[report.target], fuzz.KEPT))
        assert report.inputs >= len(TARGETS[report.target].seeds) + kept and report.lines > 12
    assert not any(report.findings for report in reports), "\n".join(map(str, reports))


def test_the_corpus_is_small_and_belongs_to_targets():
    sizes = [path.stat().st_size for path in fuzz.KEPT.rglob("*") if path.is_file()]
    assert 0 < sum(sizes) <= 500_000
    assert {folder.name for folder in fuzz.KEPT.iterdir()} <= set(TARGETS)


def test_inputs_that_reach_nothing_new_are_not_kept(tmp_path):
    target = TARGETS["manifest"]
    seed = fuzz.seeds_of(target, tmp_path / "seeds")[0]
    new, same = {"manifest.json": b"{"}, {"manifest.json": b"{{"}
    kept = in_new_process(fuzz_corpus.chosen, target.name, [seed, same, new], [], tmp_path / "work")
    assert kept == [new]
    assert in_new_process(fuzz_corpus.chosen, target.name, [new], [same], tmp_path / "other") == []


# ------------------------------------------------------------------------------------ the program finds what is wrong

SOUND = {"x": bytes(64)}


def _write_sound(folder: Path) -> None:
    write_input(SOUND, folder)


def _misbehaves(how: str, folder: Path) -> object:
    path = folder / "x"
    match how:
        case "index":
            return [][0]
        case "no path":
            raise CorruptData("it is damaged")
        case "no path in the words":
            raise ValueError("it is wrong")
        case "memory":
            return len(np.ones(100 * MIB, np.uint8))
        case "reserved":
            return np.empty(2**43, np.uint8)
        case "slow":
            until_s = time.process_time() + 1.2
            while time.process_time() < until_s:
                pass
        case "program":
            return subprocess.run(["true"], check=True)
        case "caught":
            try:
                return open("/etc/passwd")
            except BaseException:
                return None
        case "good":
            return path.read_bytes()
        case "refused":
            raise CorruptData(f"{path} is damaged", str(path))
    return None


def _outcomes(folder: Path, ways: list[str]) -> list[str | None]:
    folder.mkdir()
    _write_sound(folder)
    guard = Guard(folder)
    return [outcome(Target(way, (), (), lambda at, way=way: _misbehaves(way, at)), folder, guard) for way in ways]


def test_each_mistake_of_a_parser_is_named(tmp_path):
    expected = {
        "index": "IndexError at outside gdsdata: list index out of range",
        "no path": "CorruptData without a path: it is damaged",
        "no path in the words": "ValueError at outside gdsdata: it is wrong",
        "memory": "MiB of memory",
        "reserved": "MemoryError at outside gdsdata",
        "slow": "s of the processor",
        "program": "not a parser's business: subprocess.Popen",
        "caught": "not a parser's business: open ('/etc/passwd'",
        "good": None,
        "refused": None,
    }
    found = in_new_process(_outcomes, tmp_path / "input", list(expected))
    for said, words in zip(found, expected.values(), strict=True):
        assert said is None if words is None else words in said, f"{said!r} instead of {words!r}"


def _crashes(folder: Path) -> None:
    if (folder / "x").read_bytes() != SOUND["x"]:
        signal.raise_signal(signal.SIGSEGV)


def _hangs(folder: Path) -> None:
    if (folder / "x").read_bytes() != SOUND["x"]:
        time.sleep(3600)


@pytest.mark.parametrize(("read", "words"), [(_crashes, "crashes: SIGSEGV"), (_hangs, "hangs: still runs after 1 s")])
def test_an_input_that_ends_or_holds_the_process_is_found(tmp_path, monkeypatch, read, words):
    monkeypatch.setattr(fuzz, "_HANGS_AFTER_S", 1.0)
    report = watched(Target("planted", (), (_write_sound,), read), 0.3, SEED, tmp_path, None)
    assert list(report.findings) == [words] and report.inputs >= 1
    assert fuzz.read_input(report.findings[words]) not in (SOUND, {})
    assert f"python tests/fuzz.py planted --repeat {report.findings[words]}" in str(report)


def test_the_same_seed_makes_the_same_inputs():
    first, second, other = (
        [mutated(SOUND, [SOUND], (b"token",), dice) for _ in range(200)]
        for dice in (fuzz.random.Random(1), fuzz.random.Random(1), fuzz.random.Random(2))
    )
    assert first == second != other
    assert all(len(data) <= LARGEST_INPUT_BYTES for files in first for data in files.values())
