"""The files that a source means, and the folders that show that they are still the same."""

import glob
import os
import random
from pathlib import Path

import numpy as np
import pytest

from gdsdata.data import indexing
from gdsdata.errors import IoError
from gdsdata.formats import Records
from gdsdata.formats.expansion import folder_now
from gdsdata.formats.listing import Listing, listing_of

NAMES = ["a", "b", "ab", ".h", "c.x", "[q]", "**x", "x y"]
PARTS = ["*", "**", "a", "b", "?", "[ab]*", ".*", "*.x", ".", "a*", "[[]q]", ".h", "**x"]
SEEDS = range(12)


def test_two_dots_behind_a_link_lead_where_the_system_goes(tmp_path, monkeypatch):
    for folder in ("there/data", "data"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a").touch()
    (tmp_path / "link").symlink_to("there/data")
    monkeypatch.chdir(tmp_path)
    for source in ("link/../data/a", "link/../data/*", "link/../data"):
        assert list(listing_of(source).paths) == [f"{tmp_path}/there/data/a"]


def grow(root: Path, chosen: random.Random) -> None:
    """One more entry somewhere below: a file, a folder or a link."""
    folders = [root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())]
    path = chosen.choice(folders) / chosen.choice(NAMES)
    if os.path.lexists(path):
        return
    kind = chosen.random()
    if kind < 0.45:
        path.mkdir()
    elif kind < 0.9:
        path.touch()
    else:
        path.symlink_to(chosen.choice(["nowhere", root.with_name("outside"), root.with_name("outside") / "a"]))


def tree(folder: Path, chosen: random.Random) -> Path:
    """A folder with some entries; links lead to another one."""
    (folder / "outside").mkdir()
    (folder / "outside" / "a").touch()
    root = folder / "root"
    root.mkdir()
    for _ in range(chosen.randrange(2, 14)):
        grow(root, chosen)
    return root


def pattern(chosen: random.Random) -> str:
    parts = [chosen.choice(PARTS) for _ in range(chosen.randrange(1, 5))]
    return "/".join(part for i, part in enumerate(parts) if part != "**" or "**" not in parts[:i])


def listed(source: object) -> Listing:
    try:
        return listing_of(source)
    except FileNotFoundError:
        return Listing([], [])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_glob_means_the_files_that_pythons_glob_finds(tmp_path, monkeypatch, seed):
    chosen = random.Random(seed)
    root = tree(tmp_path, chosen)
    monkeypatch.chdir(root)
    for _ in range(60):
        wanted = chosen.choice(["", f"{root}/"]) + pattern(chosen) + chosen.choice(["", "", "", "/"])
        if os.path.exists(wanted):
            continue  # that is a file or a folder, and no glob
        expected = {os.path.abspath(path) for path in glob.glob(wanted, recursive=True) if os.path.isfile(path)}
        assert listed(wanted).paths == sorted(expected), wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_a_listing_that_changes_shows_in_one_of_its_folders(tmp_path, seed):
    chosen = random.Random(seed)
    root = tree(tmp_path, chosen)
    for _ in range(60):
        source = root / pattern(chosen) if chosen.random() < 0.8 else root
        for folder in (root, *filter(Path.is_dir, root.rglob("*"))):
            os.utime(folder, (1, 1))
        before = listed(source)
        grow(root, chosen)
        if before.paths and listed(source).paths != before.paths:
            assert any(folder_now(folder.path) != folder for folder in before.folders), source


@pytest.mark.parametrize(("lacking", "pattern"), [("y/a/1.x", "*/a/*.x"), ("y/1.x", "*/1.x"), ("x/a/2.x", "**/*.x")])
def test_a_folder_or_a_file_that_was_lacking_shows_in_one_of_the_folders(tmp_path, lacking, pattern):
    for name in ("x/a/1.x", "x/1.x", "y/other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for folder in filter(Path.is_dir, tmp_path.rglob("*")):
        os.utime(folder, (1, 1))
    before = listing_of(tmp_path / pattern)
    (tmp_path / lacking).parent.mkdir(exist_ok=True)
    (tmp_path / lacking).touch()
    assert listing_of(tmp_path / pattern).paths != before.paths
    assert any(folder_now(folder.path) != folder for folder in before.folders)


def test_lists_a_file_a_glob_a_directory_or_several_once_and_in_order(tmp_path):
    (tmp_path / "folder" / "deeper").mkdir(parents=True)
    for name in ["b.bin", "a.bin", ".hidden", "c[1].bin", "folder/d.bin", "folder/deeper/e.bin"]:
        (tmp_path / name).touch()

    def found(*sources: str) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in listing_of([tmp_path / source for source in sources]).paths]

    for source in (str(tmp_path / "a.bin"), tmp_path / "a.bin"):
        listing = listing_of(source)
        assert (listing.paths, listing.folders, listing.states) == ([str(tmp_path / "a.bin")], [], ())
    assert found("") == ["a.bin", "b.bin", "c[1].bin"]
    assert found("*.bin") == ["a.bin", "b.bin", "c[1].bin"]
    assert found("c[1].bin") == ["c[1].bin"]
    assert found("**/*.bin") == ["a.bin", "b.bin", "c[1].bin", "folder/d.bin", "folder/deeper/e.bin"]
    assert found("folder", "b.bin", "*.bin", "folder/../b.bin") == ["a.bin", "b.bin", "c[1].bin", "folder/d.bin"]


def test_a_glob_follows_no_link_that_leads_back(tmp_path):
    for folder in ("data/a", "other"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.bin").touch()
    (tmp_path / "data/a/up").symlink_to(tmp_path / "data")
    (tmp_path / "data/a/aside").symlink_to(tmp_path / "other")
    found = [os.path.relpath(path, tmp_path) for path in listed(tmp_path / "data/**/*.bin").paths]
    assert found == ["data/a/aside/x.bin", "data/a/x.bin"]


def test_refuses_an_empty_list():
    with pytest.raises(ValueError, match="source is an empty list"):
        listing_of([])


def test_refuses_an_empty_path():
    for source in ("", ["a.bin", ""]):
        with pytest.raises(ValueError, match="source has an empty path, ''"):
            listing_of(source)


def test_a_path_that_the_system_refuses_to_look_at_is_not_called_missing(tmp_path):
    (tmp_path / "a").symlink_to("a")
    with pytest.raises(IoError, match="a cannot be looked at: Too many levels of symbolic links") as caught:
        listing_of(tmp_path / "a")
    assert caught.value.path == str(tmp_path / "a")


def test_names_the_source_that_means_no_file(tmp_path):
    (tmp_path / "a.bin").touch()
    (tmp_path / "empty").mkdir()
    for missing in ("x.bin", "*.npy", "empty"):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / missing).replace("*", r"\*")):
            listing_of([tmp_path / "a.bin", tmp_path / missing])


@pytest.mark.parametrize(
    "source, is_format_given, steps",
    [
        ("b.npy", True, ["format, b.npy", "list"]),
        (["b.npy", "a.npy"], True, ["format, b.npy", "list"]),
        (["b.npy", "a.npy"], False, ["list", "format, a.npy"]),
        (".", True, ["list", "format, a.npy"]),
        ("*.npy", True, ["list", "format, a.npy"]),
    ],
)
def test_a_format_is_said_before_files_are_listed_if_one_is_known(
    tmp_path, monkeypatch, source, is_format_given, steps
):
    """A GPU's engine begins then, which needs one of the files."""
    monkeypatch.chdir(tmp_path)
    for name in ("b.npy", "a.npy"):
        np.save(name, np.zeros((3, 8), np.uint8))
    format, found = Records("u1", (8,)) if is_format_given else None, []
    monkeypatch.setattr(indexing, "listing_of", lambda *some: found.append("list") or listing_of(*some))
    made = indexing.Indexing(source, format, None, None, False)
    made.indexed(lambda format, path: found.append(f"format, {os.path.basename(path)}"))
    assert found == steps
