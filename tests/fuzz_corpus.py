"""Choose the inputs of tests/corpus: `fuzz.py` starts from them, tests/test_fuzz.py reads them.

    python tests/fuzz.py all --seconds 600 --corpus FOLDER
    python tests/fuzz_corpus.py FOLDER              # or some targets: fuzz_corpus.py FOLDER npz tar

Inputs are those that are there already and those in FOLDER. One stays if it reaches a line that
the seeds and smaller inputs do not reach. Inputs whose names begin with ``found-`` showed
defects, and stay in any case. The corpus is in the repository, so it is bounded.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import fuzz
from fuzz_guard import Guard, Lines
from fuzz_target import Files, Target
from fuzz_targets import TARGETS

FOUND = "found-"
_MOST_BYTES = 20_000  # of a target
_MOST_INPUTS = 16
_MOST_SECONDS = 0.6  # of the processor, for all that is kept of a target: a default test reads it


def chosen(name: str, candidates: Sequence[Files], always: Sequence[Files], work: Path) -> list[Files]:
    """Return the candidates that reach lines of a target which nothing smaller reaches."""
    target = TARGETS[name]
    (work / "input").mkdir(parents=True)
    lines, guard = Lines(target.modules), Guard(work)

    def reaches_new(files: Files) -> bool:
        before = lines.reached
        fuzz.write_input(files, work / "input")
        with lines:
            wrong = fuzz.outcome(target, work / "input", guard)
        return lines.reached > before and (wrong is None or wrong.startswith("takes"))

    seeds = fuzz.seeds_of(target, work / "seeds")
    fuzz.read_before(target, seeds, work / "input")
    for files in [*seeds, *always]:
        reaches_new(files)
    kept: list[Files] = []
    left_bytes, left_s = _MOST_BYTES, _MOST_SECONDS
    for files in sorted(candidates, key=_size_of):
        begun_s = time.process_time()
        if len(kept) < _MOST_INPUTS and left_s > 0 and _size_of(files) <= left_bytes and reaches_new(files):
            kept.append(files)
            left_bytes -= _size_of(files)
            left_s -= time.process_time() - begun_s
    return kept


def _size_of(files: Files) -> int:
    return sum(map(len, files.values()))


def choose(target: Target, corpus: Path, work: Path) -> str:
    """Replace what tests/corpus has for a target, and return a line about it."""
    folder = fuzz.KEPT / target.name
    always = [fuzz.read_input(one) for one in sorted(folder.glob(f"{FOUND}*"))]
    kept = chosen(target.name, [*fuzz.inputs_of(target, fuzz.KEPT), *fuzz.inputs_of(target, corpus)], always, work)
    for old in folder.iterdir() if folder.is_dir() else ():
        if not old.name.startswith(FOUND):
            shutil.rmtree(old)
    for files in kept:
        fuzz.store(files, folder)
    return f"{target.name}: {len(kept)} inputs and {len(always)} that showed defects, {sum(map(_size_of, kept))} bytes"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    given = parser.parse_args(arguments)
    for name in given.targets:
        with tempfile.TemporaryDirectory() as work:
            print(choose(TARGETS[name], given.corpus, Path(work)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
