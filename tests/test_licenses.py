"""docs/licenses.md has every package that the project names, and the license of each."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LICENSES = runpy.run_path(str(ROOT / "docs" / "make_licenses.py"))


def test_every_package_that_the_project_names_is_listed_for_its_use():
    listed = LICENSES["listed"]()
    missing = [(use, name) for use, place, name, _ in LICENSES["named"]() if (use, place) not in listed]
    assert not missing, f"run python docs/make_licenses.py: docs/licenses.md lacks {missing}"


def test_a_package_that_the_page_lacks_is_found(monkeypatch, tmp_path):
    (tmp_path / "licenses.md").write_text("| `numpy` | any | BSD-3-Clause | `import gdsdata` |\n")
    monkeypatch.setitem(LICENSES["listed"].__globals__, "PAGE", tmp_path / "licenses.md")
    assert LICENSES["listed"]() == {("required", "numpy"): "BSD-3-Clause"}


def ids(expression):
    return set(re.split(r" (?:AND|OR|WITH) |[()]", expression))


def test_installed_packages_have_the_license_that_is_listed():
    installed, listed = LICENSES["installed"]([]), LICENSES["listed"]()
    # Another version may have more or fewer parts with licenses of their own.
    wrong = [
        (name, said, found)
        for (_, name), said in listed.items()
        if not ids(found := installed.get(name, said)) & ids(said)
    ]
    assert not wrong, f"run python docs/make_licenses.py: {wrong}"


def test_the_notice_is_in_the_wheel_and_names_what_is_compiled_in():
    pyproject, notice = (ROOT / "pyproject.toml").read_text(), (ROOT / "NOTICE").read_text()
    assert re.search(r'license-files = \[.*"LICENSE".*"NOTICE".*\]', pyproject)
    parts = ("liburing", "pybind11", "DLPack", "libc++, libunwind")
    assert all(f"\n{name}\n---" in notice for name in parts)


def test_the_page_lists_the_parts_of_a_wheel_that_the_page_of_wheels_names():
    wheels = (ROOT / "docs" / "internals" / "wheels.md").read_text()
    rows = re.findall(r"^\| in the engine: ([^|]+) \|", wheels, re.MULTILINE)
    parts = [part for row in rows for part in re.split(r", | and ", row)]
    linked = LICENSES["PAGE"].read_text().partition("## Compiled in, or linked")[2].partition("\n## ")[0]
    assert "libc++" in parts and [part for part in parts if part not in linked] == []


@pytest.mark.parametrize("use", LICENSES["REQUIREMENTS"])
def test_each_file_of_requirements_is_listed(use):
    listed = {place for named, place in LICENSES["listed"]() if named == use}
    assert listed == {place for named, place, _, _ in LICENSES["named"]() if named == use} != set()


@pytest.mark.parametrize("name", ["Ruamel_YAML", "ruamel.yaml", "ruamel--yaml"])
def test_names_are_compared_as_registries_compare_them(name):
    assert LICENSES["canonical"](name) == "ruamel-yaml"
