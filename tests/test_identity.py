"""A state belongs to its data: moved folders are the same data, and differences are named."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from helpers import assert_same_batches, grouped, write_records
from sources import SOURCES

from gdsdata import GDSDataset, Mix
from gdsdata.data.identity import identity_of, relative_names
from gdsdata.data.split import Split
from gdsdata.formats import Megatron, Records
from gdsdata.formats.extents import Extents
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.io import engine


@pytest.fixture(autouse=True)
def unpacked_within(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*were unpacked.*")
        yield


def read(source, format, **arguments) -> GDSDataset:
    return GDSDataset(
        source, **grouped({"batch_size": 2, "format": format, "device": "cpu", "ragged": "padded", **arguments})
    )


def records(file, **arguments) -> GDSDataset:
    return read(file, Records("u1", (64,)), **arguments)


def flat(batches) -> list[np.ndarray]:
    """Return the values of batches with fields, one array after the other."""
    return [
        np.asarray(value) for batch in batches for value in (batch.values() if isinstance(batch, dict) else [batch])
    ]


def state_behind(dataset, batches: int = 2) -> dict:
    taken = iter(dataset)
    for _ in range(batches):
        next(taken)
    return json.loads(json.dumps(dataset.state_dict()))


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_data_in_a_moved_folder_is_resumed(tmp_path, name):
    source = SOURCES[name]
    before = tmp_path / "here"
    before.mkdir()
    source.write(before)
    dataset = read(before, source.format())
    state, rest = state_behind(dataset), flat(list(dataset)[2:])
    after = before.rename(tmp_path / "away")
    (tmp_path / "cache").exists() and (tmp_path / "cache").rename(tmp_path / "old")
    moved = read(after, source.format())
    moved.load_state_dict(state)
    assert_same_batches(flat(moved), rest)


@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.other])
def test_another_format_of_the_same_files_is_refused_and_named(tmp_path, name):
    source = SOURCES[name]
    source.write(tmp_path)
    with pytest.raises(ValueError, match="another data set or order.*format was .* and is "):
        read(tmp_path, source.other()).load_state_dict(state_behind(read(tmp_path, source.format())))


def test_a_file_of_another_name_is_refused_and_named(tmp_path):
    for name in ("a.bin", "b.bin"):
        write_records(tmp_path / name, 40, 64)
    with pytest.raises(
        ValueError, match="files were 1 of 2560 bytes, 'a.bin' first, and are 1 of 2560 bytes, 'b.bin' f"
    ):
        records(tmp_path / "b.bin").load_state_dict(state_behind(records(tmp_path / "a.bin")))


def test_files_that_have_changed_places_are_refused(tmp_path):
    for folder, names in (("one", "ab"), ("two", "ac")):
        (tmp_path / folder).mkdir()
        for name in names:
            write_records(tmp_path / folder / name, 20, 64)
    with pytest.raises(ValueError, match=r"the files were .*, 'a' first, and are .*, 'a' first \(their names differ\)"):
        records(tmp_path / "two").load_state_dict(state_behind(records(tmp_path / "one")))


def test_files_of_other_sizes_are_refused(tmp_path):
    for folder, counts in (("one", (10, 30)), ("two", (30, 10))):
        (tmp_path / folder).mkdir()
        for name, count in enumerate(counts):
            write_records(tmp_path / folder / str(name), count, 64)
    with pytest.raises(ValueError, match=r"\(their sizes differ\)"):
        records(tmp_path / "two").load_state_dict(state_behind(records(tmp_path / "one")))


def test_a_seed_of_megatrons_is_part_of_the_data(tmp_path):
    SOURCES["megatron windows"].write(tmp_path)
    state = state_behind(read(tmp_path, Megatron(5, seed=1), shuffle=False))
    with pytest.raises(ValueError, match="format was Megatron.*seed=1.* and is Megatron.*seed=2"):
        read(tmp_path, Megatron(5, seed=2), shuffle=False).load_state_dict(state)


def test_a_format_may_be_spelled_in_another_way(tmp_path):
    write_records(tmp_path / "a", 40, 64)
    state = state_behind(read(tmp_path, Records("u1", (64,))))
    read(tmp_path / "a", Records(np.uint8, (np.int64(64),))).load_state_dict(state)


def test_a_format_of_ones_own_has_an_identity_too(tmp_path):
    class Own:
        def __init__(self, records):
            self.records = records

        def index(self, paths):
            return self.records.index(paths)

    write_records(tmp_path / "a", 40, 64)
    state = state_behind(read(tmp_path, Own(Records("u1", (64,)))))
    read(tmp_path, Own(Records("u1", (64,)))).load_state_dict(state)
    with pytest.raises(ValueError, match="the samples lie at other places in the files than they did"):
        read(tmp_path, Own(Records("u1", (2, 32)))).load_state_dict(state)


def test_sources_of_a_mix_that_are_swapped_are_refused(tmp_path):
    for name in ("a.bin", "b.bin"):
        write_records(tmp_path / name, 40, 64)
    state = state_behind(Mix([records(tmp_path / "a.bin"), records(tmp_path / "b.bin")]))
    Mix([records(tmp_path / "a.bin"), records(tmp_path / "b.bin")]).load_state_dict(state)
    with pytest.raises(ValueError, match="source 0: the state is of another data set.*'a.bin' first, and are"):
        Mix([records(tmp_path / "b.bin"), records(tmp_path / "a.bin")]).load_state_dict(state)


@pytest.mark.parametrize("of_mix", [False, True])
def test_a_state_that_does_not_know_its_data_loads_with_one_warning(tmp_path, monkeypatch, of_mix):
    monkeypatch.setattr(engine, "_warned", set())
    write_records(tmp_path / "a", 40, 64)

    def make():
        return Mix([records(tmp_path), records(tmp_path, seed=1)]) if of_mix else records(tmp_path)

    state = state_behind(make())
    for one in state["sources"] if of_mix else [state]:
        del one["data"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            dataset = make()
            dataset.load_state_dict(state)
    (warning,) = caught
    assert "a state of an earlier version was loaded" in str(warning.message)
    assert dataset.state_dict()["batches"] == 2


def test_a_state_is_small_however_many_files_there_are(tmp_path):
    for i in range(300):
        write_records(tmp_path / f"a rather long name of a file {i:05}.bin", 2, 64)
    assert len(json.dumps(records(tmp_path).state_dict())) < 700


def test_a_state_is_computed_from_the_index_once(tmp_path, monkeypatch):
    write_records(tmp_path / "a", 40, 64)
    dataset, computed = records(tmp_path), []
    counted = lambda *about: computed.append(about) or identity_of(*about)  # noqa: E731
    monkeypatch.setattr("gdsdata.data.identity.identity_of", counted)
    for _ in dataset:
        dataset.state_dict()
    records(tmp_path).load_state_dict(dataset.state_dict())
    assert len(computed) == 2


@pytest.mark.parametrize(
    "paths, names",
    [
        (["/a/b/0"], ["0"]),
        (["/a/b/0", "/a/b/1"], ["0", "1"]),
        (["/a/b/0", "/a/c/0", "/a/c/d/1"], ["b/0", "c/0", "c/d/1"]),
        (["/a/bc/0", "/a/b/0"], ["bc/0", "b/0"]),
        (["/x", "/a/b"], ["x", "a/b"]),
    ],
)
def test_names_count_from_the_folder_in_common(paths, names):
    assert relative_names(paths) == names


def test_files_that_urls_name_in_their_queries_differ_and_no_secret_is_kept():
    def names(query: str) -> list[str]:
        return relative_names([f"https://host/get?f=a0.npy&{query}", f"https://host/get?f=a1.npy&{query}"])

    assert len({*names("token=secret"), *names("token=other")}) == 4
    assert not any("secret" in name or "a0" in name for name in names("token=secret"))
    signed = (
        "X-Amz-Algorithm=A&X-Amz-Credential=C&X-Amz-Date=D&X-Amz-Expires=9&X-Amz-SignedHeaders=host&X-Amz-Signature="
    )
    assert names(signed + "1") == names(signed + "2")


def extents(begins, lengths):
    return Extents.of(np.array(begins), np.array(lengths))


def test_every_part_of_an_index_that_describes_samples_counts():
    one = np.ones(1, np.int64)
    base = FieldIndex(
        ["/a"],
        one,
        one,
        np.array([0, 2]),
        (Field("x"), Field("y")),
        extents([[1, 1], [1, 1]], [[1, 1], [1, 1]]),
    )
    others = [
        dict(first_sample=np.array([0, 3])),
        dict(fields=(Field("y"), Field("x"))),
        dict(fields=(Field("x", np.dtype("<i4")), Field("y"))),
        dict(extents=extents([[1, 1], [1, 2]], [[1, 1], [1, 1]])),
        dict(extents=extents([[2, 2], [2, 2]], [[1, 1], [1, 1]])),
        dict(extents=extents([[1, 1], [1, 1]], [[1, 1], [1, 2]])),
        dict(extents=extents([[1, 1], [1, 1]], [[1, 2], [1, 2]])),
        dict(extents=extents([[1], [1], [1], [1]], [[1], [1], [1], [1]])),
    ]
    found = {
        identity_of(index, None, Split())["index"] for index in (base, *(replace(base, **other) for other in others))
    }
    assert len(found) == 1 + len(others)
    assert identity_of(replace(base, mtime_ns=one * 7), None, Split()) == identity_of(base, None, Split())


def test_a_state_of_older_versions_is_of_the_same_data():
    """The number is of a version whose fields had no units."""
    one = np.ones(1, np.int64)
    places = extents([[1, 2], [3, 4]], [[1, 1], [1, 1]])
    times = Field("t", np.dtype("<i8"), (), units=(("t", "us"),))
    index = FieldIndex(["/a"], one, one, np.array([0, 2]), (Field("x"), times), places)
    assert identity_of(index, None, Split())["index"] == "8e30eeec765820ab"
