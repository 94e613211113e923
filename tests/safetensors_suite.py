"""The tests of the package safetensors, with its own functions and with gdsdata's in their places.

    make test-safetensors
    make test-safetensors SAFETENSORS=~/safetensors

The folder is a checkout of safetensors, of the version that is installed. Without one, pip fetches
the sources. Each way runs in a process of its own. The exit status is 1 if a test passes with the
package alone and is not in `EXPECTED`, or is in it and passes with gdsdata. A test that passes with
neither says nothing about gdsdata: most of these need a framework that is not there.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = "bindings/python/tests"
WAYS = ("stock", "gdsdata")
EXPECTED: dict[str, str] = {}  # the tests that pass with the package alone, and why


class Recorder:
    """Keeps how each test ended, as a plug-in of pytest."""

    def __init__(self):
        self.ended = {}

    def pytest_runtest_logreport(self, report):
        if (report.when == "call" or not report.passed) and self.ended.get(report.nodeid) != "failed":
            self.ended[report.nodeid] = report.outcome


def fetch(folder):
    """Have pip unpack the sources of the installed version below `folder`; return their folder.

    pip cannot build them without the package's own tools, so it fails after it has unpacked them.
    """
    wanted = f"safetensors=={importlib.metadata.version('safetensors')}"
    options = ["--no-clean", "--no-deps", "--no-build-isolation", "--no-binary", "safetensors", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wanted]
    done = subprocess.run(command, env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True)
    found = [tests.parents[2] for tests in folder.glob(f"*/*/{TESTS}")]
    return found[0] if found else sys.exit(f"pip fetched no sources of {wanted}:\n{done.stdout}{done.stderr}")


def run_here(way, result):
    """Run the tests of the current folder in this process."""
    if way == "gdsdata":
        import safetensors.torch

        from gdsdata.safetensors import install, load_model, save_model

        install()
        # `install` leaves these two with the package: they call what it replaces.
        safetensors.torch.load_model, safetensors.torch.save_model = load_model, save_model
    recorder = Recorder()
    settings = ["-q", "-rsfE", "-p", "no:cacheprovider", "--rootdir", ".", "-c", os.devnull]
    pytest.main([*settings, "--continue-on-collection-errors", "tests"], plugins=[recorder])
    Path(result).write_text(json.dumps(recorder.ended))


def run_tests(checkout, way, folder):
    """Run a copy of the tests; return {name: outcome}."""
    copy, result, said = folder / way, folder / f"{way}.json", folder / f"{way}.txt"
    shutil.copytree(checkout / TESTS, copy / "tests")  # they write into ./tests/data
    paths = os.pathsep.join([str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, __file__, "--here", way, str(result)]
    with open(said, "w") as output:
        subprocess.run(command, cwd=copy, env=environment, stdout=output, stderr=output)
    return json.loads(result.read_text()) if result.exists() else sys.exit(said.read_text())


def compare(stock, ours, expected):
    """Return a sentence for each test that ended otherwise than it should."""
    worse = [name for name, outcome in stock.items() if outcome == "passed" != ours.get(name)]
    said = [f"passes with the package alone: {name}" for name in worse if name not in expected]
    return said + [f"is in EXPECTED, and passes: {name}" for name in expected if ours.get(name) == "passed"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, help="a folder with safetensors")
    parser.add_argument("--log", type=Path, help="a folder for what pytest says")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        return run_here(*chosen.here)
    with tempfile.TemporaryDirectory(prefix="gdsdata-safetensors-") as temporary:
        folder = Path(temporary)
        checkout = chosen.checkout.expanduser().resolve() if chosen.checkout else fetch(folder)
        if not (checkout / TESTS).is_dir():
            parser.error(f"{checkout} is no checkout of safetensors: it has no folder {TESTS}")
        found = {way: run_tests(checkout, way, folder) for way in WAYS}
        if chosen.log:
            chosen.log.mkdir(parents=True, exist_ok=True)
            for way in WAYS:
                shutil.copy(folder / f"{way}.txt", chosen.log)
    for way, ended in found.items():
        outcomes = list(ended.values())
        print(f"{way}: {', '.join(f'{outcomes.count(kind)} {kind}' for kind in ('passed', 'failed', 'skipped'))}")
    wrong = compare(*found.values(), EXPECTED)
    print(*wrong, *(f"differs as expected: {name}: {why}" for name, why in EXPECTED.items()), sep="\n")
    return 1 if wrong or "passed" not in found["stock"].values() else 0


if __name__ == "__main__":
    sys.exit(main())
