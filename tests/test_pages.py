"""Pages beside the guide say what programs print, and name what there is."""

import inspect
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import check_prose
import numpy as np
import pytest
from test_docs import ROOT, assert_prints, blocks, outputs

import gdsdata
from gdsdata.observe import report

pytestmark = pytest.mark.usefixtures("quick_programs")

DOCS = ROOT / "docs"
WHEELS = f"dist/gdsdata-*-cp3{sys.version_info.minor}-*.whl"


def test_the_doctor_says_what_the_first_page_shows(tmp_path):
    page = DOCS / "start.md"
    ((_, command),) = blocks(page, "console")
    (shown,) = [text for text in outputs(page).values() if text.startswith("path\n")]
    np.zeros(102_401, np.uint16).tofile(tmp_path / "tokens.bin")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    words = [sys.executable, *command.split()[1:]]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert_prints(done.stdout, shown)


def test_the_glossary_is_in_order_and_says_each_word_once():
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    words = [word.strip("`").lower().replace("_", "") for word, _ in rows]
    assert len(words) > 40 and words == sorted(set(words))
    assert all(meaning.endswith(".") for _, meaning in rows)


def test_each_answer_is_short_and_has_a_link():
    answers = re.split(r"^### (.*)$", (DOCS / "faq.md").read_text(), flags=re.MULTILINE)[1:]
    questions = dict(zip(answers[::2], answers[1::2], strict=True))
    assert 15 <= len(questions) <= 20
    for question, answer in questions.items():
        said = re.sub(r"\bAsked at .*|^## .*", "", answer, flags=re.MULTILINE | re.DOTALL)
        assert 2 <= len(list(check_prose.sentences(check_prose.plain(said)))) <= 7, question
        assert re.search(r"\]\(\s*(?!https?:)[^)]", answer), question


def test_tuning_names_options_that_there_are():
    text = (DOCS / "guide" / "tuning.md").read_text()
    classes = (gdsdata.Reading, gdsdata.Sharding, gdsdata.EngineOptions, gdsdata.AsyncCheckpointer, gdsdata.GDSDataset)
    there = {one.__name__: set(inspect.signature(one).parameters) for one in classes}
    for name, option in re.findall(r"\b(Reading|Sharding|EngineOptions)\((\w+)=", text):
        assert option in there[name], option
    rows = re.findall(r"^\| (?:\d+ \| )?`(\w+)(?:=[^`]*)?`", text, re.MULTILINE)  # a bare name
    assert len(rows) >= 10 and set(rows) <= set().union(*there.values())


def test_waiting_names_every_limiter_and_the_pictures_are_of_their_traces(monkeypatch):
    text = (DOCS / "guide" / "waiting.md").read_text()
    named = set(re.findall(r"^\| `([\w ]+)` \|", text, re.MULTILINE))
    limiters = {getattr(report, name) for name in vars(report) if name.isupper() and not name.startswith("_")}
    assert limiters <= named
    monkeypatch.syspath_prepend(DOCS)
    draw_traces = runpy.run_path(str(DOCS / "draw_traces.py"))
    for name in draw_traces["TRACES"]:
        assert draw_traces["draw"](name) == (DOCS / "guide" / "traces" / f"{name}.svg").read_text(), name
        assert f"(traces/{name}.svg)" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.new_interpreter
@pytest.mark.skipif(not any(ROOT.glob(WHEELS)), reason=f"there is no {WHEELS}: make wheels")
def test_the_first_page_works_word_by_word_in_a_new_environment(tmp_path):
    """Other packages are links to those of this environment, so pip finds them installed."""
    page, packages = DOCS / "start.md", tmp_path / "packages"
    packages.mkdir()
    for path in map(Path, {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}):
        for one in path.iterdir():
            if not one.name.startswith(("gdsdata", "__editable__", "pip")) and one.suffix != ".pth":
                (packages / one.name).symlink_to(one)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    (tmp_path / "dist").symlink_to(ROOT / "dist")
    (_, install), _ = blocks(page, "shell")
    code = "".join(code for _, code in blocks(page, "python"))
    (tmp_path / "start.py").write_text(f"import warnings\nwarnings.simplefilter('error')\n{code}")
    ((_, doctor),) = blocks(page, "console")
    site = f"env/lib/python3.{sys.version_info.minor}/site-packages"
    with_packages = f"rm -rf {site}/setuptools*\necho {packages} > {site}/packages.pth"  # torch wants a newer one
    lines = install.strip().replace("venv env\n", f"venv env\n{with_packages}\n")
    script = f"set -e\n({lines}\n) > /dev/null\n. env/bin/activate\npython start.py\n{doctor.strip()}\n"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_"))}
    environment |= {"PIP_NO_INDEX": "1", "PATH": f"{tmp_path}/bin:{environment['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert_prints(done.stdout, "".join(outputs(page).values()))
