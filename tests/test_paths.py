"""Paths that are one block of bytes are the same sequence as their list."""

import itertools
import os
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from gdsdata import AsyncCheckpointer, GDSDataset, load
from gdsdata.storage.paths import JoinedPaths, absolute, absolutes, chosen, contain, ends_of, joined

KINDS = {
    "one": ["/a"],
    "some": ["/a", "/bc", "", "/d/é", os.fsdecode(b"/\xff"), "/a"],
    "many": [f"/folder/{i}" for i in range(1000)],
}


@pytest.fixture(params=KINDS)
def both(request):
    """The list, and what should be like it."""
    content = joined(KINDS[request.param])
    return KINDS[request.param], JoinedPaths(content, ends_of(content))


def test_two_dots_behind_a_link_lead_where_the_system_goes(tmp_path, monkeypatch):
    there = tmp_path / "there"
    (there / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("there/run")
    (tmp_path / "same").symlink_to(".")
    monkeypatch.chdir(tmp_path)
    for path in ("link/../x", f"{tmp_path}/link/../x", "same/link/.././x", "link/../run/../x", "link/..//x"):
        assert absolute(path) == absolutes([path])[0] == f"{there}/x"
    assert absolute("link/..") == f"{there}"
    assert absolute("link/../*/x") == f"{there}/*/x"
    assert absolute(Path("link/../x")) == f"{there}/x"
    for path in ("there/../x", "../x", "link/x", "none/../x", "link/./x", "/../x", "same/x"):
        assert absolute(path) == os.path.abspath(path)


def test_a_deleted_working_directory_is_named_if_a_path_begins_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkdir("gone")
    monkeypatch.chdir("gone")
    os.rmdir(tmp_path / "gone")
    for refused in (GDSDataset, AsyncCheckpointer, load):
        with pytest.raises(FileNotFoundError, match="the working directory was deleted: change into another one"):
            refused("a.tar")
    with pytest.raises(FileNotFoundError, match="is no file, no directory with files"):
        GDSDataset("/none")


def test_they_are_the_same_sequence(both):
    listed, paths = both
    assert len(paths) == len(listed)
    assert list(paths) == listed == paths[:]
    assert paths == listed and listed == paths
    assert list(reversed(paths)) == listed[::-1]
    assert [paths[i] for i in range(-len(listed), len(listed))] == listed + listed
    assert listed[-1] in paths and "/nowhere" not in paths
    for wrong in (len(listed), -len(listed) - 1):
        with pytest.raises(IndexError, match=f"path {wrong} of {len(listed)}"):
            paths[wrong]


def test_slices_are_those_of_the_list(both):
    listed, paths = both
    picked = random.Random(0)
    for _ in range(200):
        ends = [picked.choice([None, picked.randrange(-12, 12)]) for _ in range(2)]
        part = slice(*ends, picked.choice([None, 1, 2, -1, -3]))
        assert paths[part] == listed[part]


def test_paths_at_some_places_are_those_of_the_list(both):
    listed, paths = both
    picked = np.random.default_rng(0)
    for count in (0, 1, 2, 50):
        places = picked.integers(0, len(listed), count)
        found = paths.at(places)
        assert list(found) == [listed[place] for place in places] == list(chosen(listed, places))
        assert joined(found).tobytes() == joined(list(found)).tobytes()


def test_another_sequence_is_not_equal(both):
    listed, paths = both
    assert paths != listed[:-1] and paths != [*listed[:-1], "/other"] and paths != 5


def test_a_pickle_is_a_list(both):
    listed, paths = both
    assert pickle.loads(pickle.dumps(paths)) == listed
    assert type(pickle.loads(pickle.dumps(paths))) is list


def test_they_join_without_a_copy(both):
    listed, paths = both
    assert joined(paths) is paths.joined
    assert np.array_equal(joined(listed), paths.joined)


def test_absolute_paths_are_those_of_the_system():
    paths = ["".join(letters) for count in range(6) for letters in itertools.product("/.a", repeat=count)]
    assert [absolutes([path]) for path in paths] == [[os.path.abspath(path)] for path in paths]
    (found,) = absolutes([np.str_("/a/b")])
    assert type(found) is str  # an array of names has strings of a class of its own


@pytest.mark.parametrize("hidden", ["/.a/b", "/..a/b", "/.../b", "/a/.b", "/a/..b", "/a/...", "/é/.é"])
def test_hidden_files_and_folders_are_absolute_as_they_are(monkeypatch, hidden):
    monkeypatch.setattr(os.path, "abspath", None)
    assert absolutes(["/a", hidden, "/b"]) == ["/a", hidden, "/b"]


class Named(str):
    """A string of a class of its own, as numpy has."""


def test_absolute_paths_of_many_are_those_of_each():
    picked = random.Random(0)
    some = ["/a/b", "/c", "", "/", "a", "/a/", "/a//b", "/./a", "/a/..", "/.a", "/a\0/b", "a\0", Named("/n")]
    for count in range(4):
        for paths in itertools.product(some, repeat=count):
            found = absolutes(list(paths))
            assert found == [os.path.abspath(path) for path in paths], paths
            assert set(map(type, found)) <= {str}
    normal = [f"/folder/{i}" for i in range(100)]
    for other in some:
        paths = picked.sample([*normal, other], len(normal) + 1)
        assert absolutes(paths) == [os.path.abspath(path) for path in paths]


@pytest.mark.parametrize("part", ["://", "{"])
def test_a_part_is_found_in_one_path_and_not_across_two(part):
    for paths in ([], [part], ["/a", f"/b{part}c"], ["/a", *part], [part[:-1], f"{part[-1]}/x"]):
        listed = any(part in path for path in paths)
        assert contain(paths, part) == listed
        if paths:
            content = joined(paths)
            assert contain(JoinedPaths(content, ends_of(content)), part) == listed
