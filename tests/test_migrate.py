"""The diffs of docs/migrate: the scripts before and after one train on the same samples.

A page's diff holds both scripts as a whole, and a test takes them from it. The page also has the
program that makes their data.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
if not (ROOT / "docs").exists():
    pytest.skip("no docs/ beside these tests", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("quick_programs", "programs_that_train")

# By the name of a page. `make test` has torch alone, and `make test-frameworks` all but DALI, which
# takes 424 MB: `make test-dali`.
NEEDS = {
    "torch-dataloader": ["torch"],
    "webdataset": ["webdataset", "torchvision"],
    "mosaicml-streaming": ["streaming"],
    "litdata": ["litdata"],
    "dali": ["nvidia.dali"],
    "huggingface-datasets": ["datasets", "pyarrow"],
}


def page(name):
    return (ROOT / "docs" / "migrate" / f"{name}.md").read_text()


def data_program(text):
    (program,) = re.findall(r"^```python skip: make_data\.py[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return program


def scripts(text):
    """Return the scripts before and after the page's diff, and the diff itself."""
    ((diff, body),) = re.findall(
        r"^```diff\n(--- a/train\.py\n\+\+\+ b/train\.py\n@@[^\n]*@@\n(.*?))^```$", text, re.MULTILINE | re.DOTALL
    )
    lines = [line or " " for line in body.split("\n")[:-1]]
    before = [line[1:] for line in lines if line[0] in " -"]
    after = [line[1:] for line in lines if line[0] in " +"]
    assert f"@@ -1,{len(before)} +1,{len(after)} @@" in diff, "the diff's numbers of lines are wrong"
    return "\n".join(before) + "\n", "\n".join(after) + "\n", diff


def run(folder, script, *arguments):
    """Return the lines that a script prints. It runs on the CPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    environment["XDG_CACHE_HOME"] = environment["HOME"] = str(folder / "cache")
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("epoch ")]


def sums(lines):
    return [re.search(r"sum (\S+),", line)[1] for line in lines]


def test_every_page_has_a_test():
    pages = {path.stem for path in (ROOT / "docs" / "migrate").glob("*.md")} - {"README"}
    assert pages == set(NEEDS)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("name", NEEDS)
def test_the_diff_of_a_page_is_one_that_git_applies(name, tmp_path):
    before, after, diff = scripts(page(name))
    (tmp_path / "train.py").write_text(before)
    subprocess.run(["git", "apply", "-"], input=diff, cwd=tmp_path, text=True, check=True, timeout=60)
    assert (tmp_path / "train.py").read_text() == after
    compile(data_program(page(name)), name, "exec")
    assert "import gdsdata\n" in after and "gdsdata" not in before


# LitData starts processes that import the main module again.
CASES = [pytest.param(name, marks=[pytest.mark.new_interpreter] * (name == "litdata")) for name in NEEDS]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", CASES)
def test_both_scripts_of_a_page_train_on_the_same_samples(name, tmp_path):
    if lacking := [package for package in NEEDS[name] if not is_installed(package)]:
        pytest.skip(f"{lacking[0]} is not installed")
    before, after, _ = scripts(page(name))
    for script, text in (("make_data.py", data_program(page(name))), ("before.py", before), ("after.py", after)):
        (tmp_path / script).write_text(text)
    run(tmp_path, "make_data.py")
    expected = run(tmp_path, "before.py", "--in-order")
    assert len(expected) == 2
    assert run(tmp_path, "after.py", "--in-order") == expected
    shuffled = run(tmp_path, "after.py")
    assert shuffled != expected and sums(shuffled) == sums(expected)


def is_installed(package):
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # the package above it
        return False
