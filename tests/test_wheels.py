"""The sdist and the wheels: their content, their builds, and the workflows that publish them."""

import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted(ROOT.glob(".github/*/**/*.yml"))
TOOLS = ROOT / "build" / "wheel-tools" / "bin" / "python"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

pytestmark = [
    pytest.mark.skipif(not (ROOT / "MANIFEST.in").exists(), reason="these tests are about the sources"),
    pytest.mark.filterwarnings("ignore"),  # pytest-xdist cannot pass on the private classes of setuptools' warnings
]


def files_of(*folders):
    """Return the repository's files, without those that builds and runs leave there."""
    left = re.compile(r"(^|/)__pycache__/|\.(pyc|so)$|^docs/reference/gdsdata|^gdsdata/configs/|\.egg-info/")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    assert paths
    return {name for path in paths if not left.search(name := path.relative_to(ROOT).as_posix())}


@pytest.fixture(scope="module")
def distribution():
    """Return what setuptools knows of the project, with the repository as the working directory."""
    from setuptools import Distribution

    before = Path.cwd()
    os.chdir(ROOT)
    made = Distribution({"script_name": "setup.py"})
    made.parse_config_files()
    yield made
    os.chdir(before)


def test_sdist_has_every_file_that_builds_and_tests_it(distribution, tmp_path):
    distribution.get_option_dict("egg_info")["egg_base"] = ("this test", str(tmp_path))
    distribution.run_command("egg_info")
    listed = set((tmp_path / "gdsdata.egg-info" / "SOURCES.txt").read_text().splitlines())
    wanted = files_of("gdsdata", "csrc", "configs", "licenses", "docs", "examples", ".ci") | files_of("tests")
    assert wanted | {"LICENSE", "Makefile", "README.md", "CHANGELOG.md", "pyproject.toml"} <= listed
    assert not [name for name in listed if "__pycache__" in name or name.endswith(".so")]


def test_wheel_has_every_file_of_the_package(distribution):
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    modules = {Path(path) for _, _, path in build.find_all_modules()}
    data = {Path(folder) / name for _, folder, _, names in build.data_files for name in names}
    packed = {path.as_posix() for path in modules | data}
    configs = {f"gdsdata/{name}" for name in files_of("configs")}
    assert packed == files_of("gdsdata") | configs


def test_pythons_of_the_wheels_are_those_that_the_package_names():
    script = (ROOT / ".ci" / "wheels.py").read_text()
    built = re.findall(r'"([\d.]+)"', re.search(r"^PYTHONS = (.*)$", script, re.MULTILINE)[1])
    metadata = (ROOT / "pyproject.toml").read_text()
    assert built == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', metadata)
    assert f'requires-python = ">={built[0]}"' in metadata
    workflow = (ROOT / ".github" / "workflows" / "wheels.yml").read_text()
    assert sorted(built) == sorted(re.findall(r"^ {12}(3\.\d+)$", workflow, re.MULTILINE))


# --- a clean machine --------------------------------------------------------------------------------------------------


@pytest.fixture
def clean_machine(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / ".ci")
    return importlib.import_module("clean_machine")


def test_clean_machine_reads_every_block_of_the_first_page(clean_machine):
    text = clean_machine.PAGE.read_text()
    page = clean_machine.read_page(text)
    assert "pip install --no-index --find-links dist gdsdata\n" in page.install
    assert [code for code, _ in page.session] == re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown = [output for _, output in (*page.session, page.doctor)]
    assert sum(map(bool, shown)) == text.count("```text output\n")
    assert page.session[1][1] == "1600 samples, 100 batches of torch.int64 (16, 65)\n"


def test_clean_machine_fails_if_an_output_is_not_the_pages(clean_machine):
    clean_machine.compare("works: /tmp/tokens.bin\n", "works: ...\n", "the command")
    with pytest.raises(SystemExit, match="shows\nworks(?s:.*)this is\nno"):
        clean_machine.compare("no\n", "works: ...\n", "the command")


# --- workflows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_targets_of_the_makefile(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", path.read_text())) <= targets


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_have_no_right_that_they_do_not_name(path):
    assert yaml.safe_load(path.read_text())["permissions"] == {"contents": "read"}


def test_actionlint_finds_nothing():
    found = shutil.which("actionlint", path=f"{ROOT}/build/go/bin:{os.environ['PATH']}")
    if found is None:
        pytest.skip("actionlint is not here: make lint-workflows installs it with Go")
    ran = subprocess.run([found, "-shellcheck="], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


# --- builds -----------------------------------------------------------------------------------------------------------


def build_wheel(root, out):
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    command = [TOOLS, ".ci/wheels.py", PYTHON, "--out", str(out)]
    ran = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    [wheel] = out.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_same_sources_give_the_same_wheel_in_another_folder(tmp_path):
    if not TOOLS.exists():
        pytest.skip("build/wheel-tools is not here: make wheels makes it")
    copy = tmp_path / "another folder's name" / "gdsdata"
    copied = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in copied.splitlines():
        (copy / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copyfile(ROOT / name, copy / name, follow_symlinks=False)
    first, second = (build_wheel(root, tmp_path / out) for root, out in ((ROOT, "first"), (copy, "second")))
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wheel_builds_from_the_sdist(tmp_path):
    """The environment is that of the tests. `make sdist` builds in an environment of its own."""
    program = "import setuptools.build_meta as meta, sys; print(meta.build_sdist(sys.argv[1]))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, env=environment, check=True)
    [sdist] = tmp_path.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, str(sdist)], cwd=tmp_path, env=environment, check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.stat().st_size > 1_000_000
