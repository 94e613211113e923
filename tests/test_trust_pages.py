"""The pages about trust: each file, test, target and module that they name exists."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["docs/threat-model.md", "docs/verified.md"]
PATH = r"(?:tests|gdsdata|csrc|benchmarks|examples|docs)/[\w./-]+"


def names_in(text):
    """Return the code between backticks, without the targets of links."""
    return re.findall(r"`([^`\n]+)`", text)


def missing_in(text):
    """Return what a page names and the repository does not have."""
    makefile, missing = (ROOT / "Makefile").read_text(), []
    for code in names_in(text):
        for path, test in re.findall(rf"({PATH})(?:::(\w+))?", code):
            there = ROOT / path.rstrip(".")
            if not there.exists() or test and f"def {test}(" not in there.read_text():
                missing.append(code)
        for target in re.findall(r"make (?!\w+=|-)([a-z-]+)", code):
            if not re.search(rf"^{target}:", makefile, re.MULTILINE):
                missing.append(code)
        for fuzzed in re.findall(r"make fuzz ARGS=\"?([a-z-]+)", code):
            if fuzzed != "all" and f'"{fuzzed}"' not in "".join(
                path.read_text() for path in (ROOT / "tests").glob("fuzz_*.py")
            ):
                missing.append(code)
        for module in re.findall(r"python -m (gdsdata[\w.]*)", code):
            if importlib.util.find_spec(module) is None:
                missing.append(code)
        for suite in re.findall(r"GTEST_FILTER='?(\w+)", code):
            if not any(f"({suite}," in path.read_text() for path in (ROOT / "tests" / "cpp").glob("*_test.cpp")):
                missing.append(code)
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_names_in_a_page_about_trust_exist(page):
    text = (ROOT / page).read_text()
    assert len(names_in(text)) > 20 and missing_in(text) == []


@pytest.mark.parametrize(
    "code",
    [
        "tests/test_none.py",
        "tests/test_fuzz.py::test_none",
        "gdsdata/none.py",
        "make none",
        "make fuzz ARGS=nothing",
        "python -m gdsdata.none",
        "GTEST_FILTER='None.*'",
    ],
)
def test_a_name_that_does_not_exist_is_found(code):
    assert missing_in(f"see `{code}`") == [code]
    assert missing_in("see `tests/test_fuzz.py::test_the_same_seed_makes_the_same_inputs`, `make fuzz`") == []
