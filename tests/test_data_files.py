"""Bare files are known by nothing, so what stands beside them in a folder becomes no samples."""

import re

import numpy as np
import pytest

import gdsdata
from gdsdata.formats import Npy, Records, Tokens

TOKENS = np.arange(1000, 1200, dtype=np.uint16)
BESIDE = {
    "nanoGPT": ("train.bin", "val.bin", "meta.pkl"),
    "datatrove": ("00000.ds", "00000.ds.index", "00000.ds.metadata"),
    "Megatron-LM": ("text_document.bin", "text_document.idx"),
    "OLMo": ("part-0.npy", "part-1.npy", "part-0.csv.gz"),
    "a note": ("train.bin", "NOTES"),
    "nanoGPT without val": ("train.bin", "meta.pkl"),
    "a text": ("train.bin", "ABOUT.txt"),
}
bare = pytest.mark.parametrize("format", [Tokens("uint16", 4), Records("uint16", 5)], ids=["Tokens", "Records"])


def placed(folder, names):
    folder.mkdir(exist_ok=True)
    for name in names:
        TOKENS.tofile(folder / name)
    return str(folder)


def read(source, format, **arguments) -> int:
    """Return how many samples a data set of it has."""
    return len(gdsdata.GDSDataset(source, 1, format, device="cpu", **arguments))


@bare
@pytest.mark.parametrize("writer", BESIDE)
@pytest.mark.parametrize("glob", ["", "*", "**/*"])
def test_a_folder_of_bare_files_with_unlike_endings_is_refused(tmp_path, writer, format, glob):
    folder = placed(tmp_path / "data", BESIDE[writer])
    ending = BESIDE[writer][0].rpartition(".")[2]
    here = re.escape(folder)
    with pytest.raises(ValueError, match=rf"{here}/.*{type(format).__name__} would read.*as in '{here}/\*\.{ending}'"):
        read(f"{folder}/{glob}" if glob else folder, format)


@bare
@pytest.mark.parametrize("writer", BESIDE)
def test_the_glob_that_the_refusal_names_has_the_bare_files_alone(tmp_path, writer, format):
    folder = placed(tmp_path / "data", BESIDE[writer])
    with pytest.raises(ValueError) as caught:
        read(folder, format)
    (glob,) = re.findall(r"as in '(.*)'", str(caught.value))
    ending = glob.rpartition(".")[2]
    assert read(glob, format) == read([f"{folder}/{n}" for n in BESIDE[writer] if n.endswith(f".{ending}")], format)


@bare
def test_split_refuses_bare_files_with_unlike_endings_too(tmp_path, format):
    folder = placed(tmp_path / "data", ["train.bin", "train.pkl", "val.bin"])
    with pytest.raises(ValueError, match=r"as in '.*/\*\.bin'"):
        read(folder, format, split="train")
    assert read(folder, format, split="val")


@bare
@pytest.mark.parametrize(
    "names",
    [
        ("a.bin", "b.bin", "C.BIN"),
        ("shard_0", "shard_1"),
        ("tokens.0", "tokens.1", "tokens.10"),
        ("a.bin", "a.bin.1", "a.bin.2"),
        ("v1.5_a", "v1.5_b"),
        ("a.bin", "README.md", "LICENSE", "_SUCCESS"),
        ("a.bin", ".a.bin.crc"),
    ],
)
def test_bare_files_with_numbers_or_no_endings_are_read(tmp_path, format, names):
    folder = placed(tmp_path / "data", names)
    data = [name for name in names if name not in ("README.md", "LICENSE", "_SUCCESS", ".a.bin.crc")]
    assert read(folder, format) == len(data) * read(f"{folder}/{names[0]}", format)


@bare
def test_bare_files_that_are_named_may_have_unlike_endings(tmp_path, format):
    folder = placed(tmp_path / "data", ["a.bin", "b.raw"])
    assert read([f"{folder}/a.bin", f"{folder}/b.raw"], format) == 2 * read(f"{folder}/a.bin", format)
    assert read([f"{folder}/*.bin", f"{folder}/b.raw"], format) == 2 * read(f"{folder}/a.bin", format)
    assert read([f"{folder}/*.bin", f"{folder}/*.raw"], format) == 2 * read(f"{folder}/a.bin", format)
    assert read(f"{folder}/*.{{bin,raw}}", format) == 2 * read(f"{folder}/a.bin", format)
    assert read(f"{folder}/{{a.bin,b.raw}}", format) == 2 * read(f"{folder}/a.bin", format)


def test_files_of_a_format_with_a_magic_may_have_unlike_endings(tmp_path):
    for name in ("a.npy", "b.data"):
        with open(tmp_path / name, "wb") as file:
            np.save(file, TOKENS)
    assert read(str(tmp_path), Npy("row")) == 2 * len(TOKENS)


def test_the_refusal_names_an_ending_before_its_numbers(tmp_path):
    folder = placed(tmp_path / "data", ["a.BIN.0", "a.BIN.1", "meta.pkl"])
    with pytest.raises(ValueError, match=r"as in '.*/\*\.BIN'"):
        read(folder, Tokens("uint16", 4))
    placed(tmp_path / "data", ["shard_0", "shard_1", "shard_2"])
    with pytest.raises(ValueError, match=r"as in \['.*/shard_0'\]"):
        read(folder, Tokens("uint16", 4))
