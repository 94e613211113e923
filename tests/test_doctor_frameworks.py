"""`python -m gdsdata.doctor --frameworks`: versions, adapters, and whether hooks are in place."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys

import pytest

import gdsdata
from gdsdata import torch_private
from gdsdata.doctor import __main__ as program
from gdsdata.doctor import frameworks


def version_in(versions: dict[str, str]):
    def version_of(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    return version_of


def found(**versions: str) -> dict[str, frameworks.Installed]:
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    return {one.name: one for one in frameworks.installed(version_in(names))}


def test_versions_are_compared_with_the_tested_ones():
    versions = {"torch": "2.16.0+cu132", "accelerate": "0.30.1", "peft": "0.21.9", "vllm": "0.33.0"}
    by_name = found(**versions, transformers="main")
    answers = {name: one.answer for name, one in by_name.items()}
    assert (answers["torch"], answers["accelerate"], answers["peft"]) == ("newer", "older", "tested")
    assert (answers["vllm"], answers["transformers"], answers["ray"]) == ("tested", "not tested", "absent")
    assert by_name["torch"].tested == "2.9 to 2.15" and by_name["peft"].tested == "0.21"
    assert by_name["torch"].version == "2.16.0+cu132" and by_name["ray"].version is None
    assert by_name["vllm"].adapters == ("gdsdata.integrations.vllm",)


@pytest.mark.parametrize(
    ("version", "answer"),
    [
        *[("0.5.1", "older"), ("0.5.13", "tested"), ("0.5.14", "not tested"), ("0.5.18.post1", "tested")],
        *[("0.5.23", "tested"), ("0.5.99", "newer"), ("0.6", "newer"), ("0.5", "older")],
    ],
)
def test_only_versions_whose_interfaces_were_recorded_count_as_tested(version, answer):
    by_name = found(sglang=version, vllm="0.24.0")
    assert by_name["sglang"].answer == answer and by_name["sglang"].tested == "0.5.13, 0.5.18, 0.5.23"
    assert by_name["vllm"].answer == "not tested" and by_name["vllm"].tested == "0.14.1, 0.23.0, 0.33.0"
    advised = "Versions that were not tested" in frameworks.as_text([by_name["sglang"]])
    assert advised is (answer != "tested")


def test_another_distribution_of_the_same_modules_counts():
    assert found(pytorch_lightning="2.6.6")["pytorch-lightning"].answer == "tested"
    assert found()["lightning"].answer == "absent"


def test_the_table_has_the_torch_that_is_checked_and_names_adapters_that_are_there():
    torch = frameworks.FRAMEWORKS[0]
    assert (torch.oldest, torch.newest) == torch_private.CHECKED
    for one in {adapter for found in frameworks.installed() for adapter in found.adapters}:
        module, _, name = one.rpartition(".")
        assert callable(getattr(importlib.import_module(module), name, None)) or importlib.util.find_spec(one), one


def test_installed_frameworks_are_not_newer_than_the_table_says():
    newer = [(one.name, one.version) for one in frameworks.installed() if one.answer == "newer"]
    assert newer == [], "raise `newest` in gdsdata/doctor/frameworks.py"


@pytest.mark.parametrize("hooked", [True, False])
def test_the_program_prints_frameworks_and_imports_none(capsys, monkeypatch, hooked):
    before = set(sys.modules)
    if hooked:
        with gdsdata.torch_hooks():
            assert program.main(["--frameworks"]) == 0
    else:
        assert program.main(["--frameworks"]) == 0
    assert not {"accelerate", "lightning", "transformers", "peft"} & (set(sys.modules) - before)
    said = capsys.readouterr().out
    # The command's own process is not the one that a user asks about.
    assert ("torch_hooks are in place in this process" in said) is hooked and "are not in place" not in said
    assert ("A program has torch_hooks of its own" in said) is not hooked
    (line,) = [line for line in said.splitlines() if line.startswith("torch ")]
    assert line.split()[1] == importlib.metadata.version("torch") and line.endswith("gdsdata.torch_hooks")


@pytest.mark.parametrize("hooked", [True, False])
def test_a_program_that_prints_the_table_learns_of_its_own_hooks(hooked):
    with gdsdata.torch_hooks() if hooked else contextlib.nullcontext():
        said = frameworks.as_text(frameworks.installed())
    assert said.endswith(f"gdsdata.torch_hooks {'are' if hooked else 'are not'} in place in this process.")


def test_frameworks_as_json(capsys):
    assert program.main(["--frameworks", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["hooks"] is None  # those of other programs are not known
    with gdsdata.torch_hooks():
        assert program.main(["--frameworks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hooks"] is True
    assert said["frameworks"][0]["name"] == "torch" and len(said["frameworks"]) == len(frameworks.FRAMEWORKS)
