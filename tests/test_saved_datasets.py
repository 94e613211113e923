"""Folders that the package `datasets` saved: the rows are those that its state.json lists."""

import errno
import json
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_server import serving

import gdsdata
from gdsdata.data import indexing
from gdsdata.errors import IoError
from gdsdata.formats.listing import listing_of

LONG_AGO = 1_000_000_000
TWO = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
LEFT = ["cache-0123456789abcdef.arrow", "cache-fedcba9876543210_00000_of_00002.arrow", "tmpk3_x9ab2"]


def write(path, *numbers):
    """Write rows as `datasets` does: an Arrow stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"x": pa.array(numbers, pa.int64())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def state_of(names, **more):
    files = [name if isinstance(name, dict) else {"filename": name} for name in names]
    return json.dumps({"_data_files": files, "_fingerprint": "0123456789abcdef", "_split": None, **more}, indent=2)


def save(folder, names=TWO, left=LEFT, **more):
    """Write rows 0, 1, 2, ..., two a file, as `save_to_disk` does; and what `map` leaves beside."""
    for place, name in enumerate(names):
        write(folder / name, 2 * place, 2 * place + 1)
    for name in left:
        write(folder / name, -1, -2, -3)
    (folder / "state.json").write_text(state_of(names, **more))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def rows(source, **named):
    batches = gdsdata.GDSDataset(source, 100, shuffle=False, device="cpu", **named)
    return [x for batch in batches for x in batch["x"].tolist()]


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as server:
        yield server


# ------------------------------------------------------------------------------------------------------------- rows


def test_caches_that_the_package_leaves_in_a_saved_folder_are_no_rows(tmp_path):
    assert rows(save(tmp_path / "saved")) == [0, 1, 2, 3]


def test_a_split_of_a_datasetdict_has_no_rows_of_caches(tmp_path):
    save(tmp_path / "train")
    save(tmp_path / "test", ["data-00000-of-00001.arrow"])
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert rows(tmp_path, split="train") == rows(tmp_path / "train", split="train") == [0, 1, 2, 3]
    assert rows(tmp_path, split="test") == [0, 1]


def test_objects_of_a_saved_folder_have_no_rows_of_caches(tmp_path, server):
    save(tmp_path / "set" / "train")
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    server.put_folder(tmp_path / "set", "set/")
    assert rows(server.url("set/train/")) == rows(server.url("set/train")) == [0, 1, 2, 3]
    assert rows(server.url("set/"), split="train") == [0, 1, 2, 3]


def test_a_glob_and_a_list_of_files_mean_what_they_say(tmp_path):
    folder = save(tmp_path / "saved", left=LEFT[:1])
    assert rows(f"{folder}/*.arrow") == rows([folder / name for name in (*TWO, LEFT[0])]) == [-1, -2, -3, 0, 1, 2, 3]
    assert rows([folder, folder / LEFT[0]]) == [-1, -2, -3, 0, 1, 2, 3]


def test_rows_come_in_the_order_of_state_json(tmp_path):
    folder = save(tmp_path / "b", ["z.arrow", "cache-00.arrow", "m.arrow"], left=["a.arrow", "n.arrow"])
    write(tmp_path / "a.arrow", -1)
    write(tmp_path / "c.arrow", -2)
    assert rows(folder) == [0, 1, 2, 3, 4, 5]
    assert rows([tmp_path / "c.arrow", folder, tmp_path / "a.arrow"]) == [-1, 0, 1, 2, 3, 4, 5, -2]


def test_objects_come_in_the_order_of_state_json(tmp_path, server):
    server.put_folder(save(tmp_path / "set", ["z.arrow", "m.arrow"]), "set/")
    assert rows(server.url("set/")) == [0, 1, 2, 3]


def test_two_saved_folders_come_in_the_order_of_their_names(tmp_path):
    second = save(tmp_path / "b", ["z.arrow", "m.arrow"])
    first = save(tmp_path / "a", ["z.arrow", "m.arrow"])
    write(first / "z.arrow", 10, 11)
    assert rows([second, first]) == [10, 11, 2, 3, 0, 1, 2, 3]


def test_formats_and_columns_in_state_json_change_no_rows(tmp_path):
    more = {
        "_format_columns": ["y"],
        "_format_type": "torch",
        "_output_all_columns": False,
        "_indices_data_files": None,
    }
    assert rows(save(tmp_path / "saved", **more)) == [0, 1, 2, 3]


# --------------------------------------------------------------------------------------------------------- refusals


def test_a_file_that_is_listed_and_lacking_is_named(tmp_path):
    folder = save(tmp_path / "saved")
    (folder / TWO[1]).unlink()
    with pytest.raises(FileNotFoundError, match=rf"saved/state.json lists '{TWO[1]}', which is not in its folder"):
        listing_of(folder)


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside.arrow", "sub/inside.arrow", "", ".", "\0"])
def test_a_name_in_another_folder_is_not_followed(tmp_path, name):
    folder = save(tmp_path / "saved")
    write(tmp_path / "outside.arrow", 1)
    write(folder / "sub" / "inside.arrow", 1)
    (folder / "state.json").write_text(state_of([*TWO, name]))
    for split in (None, "train"):
        with pytest.raises(FileNotFoundError, match="which is not in its folder"):
            listing_of(folder, split)


def test_a_lacking_file_of_another_split_is_no_error(tmp_path):
    save(tmp_path / "train")
    (save(tmp_path / "test") / TWO[0]).unlink()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert rows(tmp_path, split="train") == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError, match=rf"test/state.json lists '{TWO[0]}'"):
        listing_of(tmp_path, "test")


@pytest.mark.parametrize("key", ["_indices_data_files", "_indices_files"])
def test_an_index_file_that_chooses_rows_is_refused(tmp_path, key):
    folder = save(tmp_path / "saved", ["dataset.arrow"], ["indices.arrow"], **{key: [{"filename": "indices.arrow"}]})
    with pytest.raises(ValueError, match=rf"state.json lists index files \({key}\), .*flatten_indices\(\)"):
        listing_of(folder)
    assert rows(folder / "dataset.arrow") == [0, 1]


def test_a_part_of_a_file_is_refused(tmp_path):
    names = [TWO[0], {"filename": TWO[1], "skip": 0, "take": 1}]
    folder = save(tmp_path / "saved")
    (folder / "state.json").write_text(state_of(names))
    with pytest.raises(ValueError, match=f"state.json lists a part of '{TWO[1]}' .*save"):
        listing_of(folder)
    (folder / "state.json").write_text(state_of([TWO[0], {"filename": TWO[1], "skip": None, "take": None}]))
    assert rows(folder) == [0, 1, 2, 3]


def test_a_file_that_is_listed_twice_is_refused(tmp_path):
    folder = save(tmp_path / "saved")
    (folder / "state.json").write_text(state_of([*TWO, TWO[0]]))
    with pytest.raises(ValueError, match=f"state.json lists '{TWO[0]}' twice"):
        listing_of(folder)


def test_a_state_json_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    folder = save(tmp_path / "saved")

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(np, "fromfile", fail)
    with pytest.raises(IoError, match=r"reading .*saved/state.json failed: Input/output error"):
        listing_of(folder)


# ------------------------------------------------------------------------------------------------- other state.json


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b"{}",
        b'{"version": 4, "resources": []}',
        b'{"_data_files": null}',
        b'{"_data_files": []}',
        b'{"_data_files": ["a.arrow"]}',
        b'{"_data_files": [{"filename": 3}]}',
        b"[" * 100_000,
    ],
)
def test_a_state_json_of_another_program_changes_nothing(tmp_path, content):
    folder = save(tmp_path / "saved", left=LEFT[:1])
    (folder / "state.json").write_bytes(content)
    assert rows(folder) == [0, 1, 2, 3]  # dataset_info.json says that a cache is one
    (folder / "dataset_info.json").unlink()
    assert rows(folder) == [-1, -2, -3, 0, 1, 2, 3]


def test_caches_beside_dataset_info_json_alone_are_no_rows(tmp_path, server):
    folder = save(tmp_path / "imdb", ["imdb-train.arrow"])
    (folder / "state.json").unlink()
    (folder / "imdb-train.arrow.lock").touch()
    server.put_folder(folder, "imdb/")
    for source in (folder, server.url("imdb/")):
        assert rows(source) == rows(source, split="train") == [0, 1]


def test_a_folder_of_files_that_are_called_like_caches_alone_keeps_them(tmp_path):
    folder = save(tmp_path / "saved", [LEFT[0]], left=())
    (folder / "state.json").unlink()
    assert rows(folder) == [0, 1]


NAMES = st.sampled_from([*TWO, *LEFT, "lacking.arrow", "../outside.arrow"])
PARTS = st.none() | st.integers(0, 2)
ENTRIES = st.one_of(
    st.fixed_dictionaries({"filename": NAMES}, optional={"skip": PARTS, "take": PARTS}),
    st.fixed_dictionaries({"filename": NAMES}),
    st.sampled_from([None, TWO[0], {}, {"filename": None}]),
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(ENTRIES, max_size=4))
def test_whole_files_of_the_folder_are_taken_and_all_else_that_is_listed_is_refused(tmp_path_factory, entries):
    folder = tmp_path_factory.getbasetemp() / "any"
    if not folder.exists():
        save(folder)
    (folder / "state.json").write_text(json.dumps({"_data_files": entries}))
    is_list_of_files = bool(entries) and all(isinstance(one, dict) and one.get("filename") for one in entries)
    wanted = [one["filename"] for one in entries] if is_list_of_files else TWO
    are_whole = not is_list_of_files or all(one.get("skip") is one.get("take") is None for one in entries)
    if are_whole and len(set(wanted)) == len(wanted) and set(wanted) <= {*TWO, *LEFT}:
        assert listing_of(folder).paths == [str(folder / name) for name in wanted]
    else:
        with pytest.raises((FileNotFoundError, ValueError), match="any/state.json lists "):
            listing_of(folder)


# -------------------------------------------------------------------------------------------------- index and state


def settled(folder):
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.mark.parametrize("before", [TWO[::-1], "foreign"])
def test_a_kept_index_is_not_used_if_state_json_has_changed(tmp_path, monkeypatch, before):
    monkeypatch.setattr(indexing, "WORTH_S", -1.0)
    folder, cache = save(tmp_path / "saved"), tmp_path / "cache"
    (folder / "state.json").write_text("{}" if before == "foreign" else state_of(before))
    settled(folder)
    reading = gdsdata.Reading(index_cache=cache)
    first = rows(folder, reading=reading)
    assert first == ([0, 1, 2, 3] if before == "foreign" else [2, 3, 0, 1])
    assert len(list(cache.glob("*.gdsdata-index"))) == 1
    with open(folder / "state.json", "w") as file:  # in place: the folder stays as it was
        file.write(state_of([TWO[1]]))
    os.utime(folder / "state.json", (LONG_AGO + 9, LONG_AGO + 9))
    assert rows(folder, reading=reading) == [2, 3]


def test_a_kept_index_of_objects_is_not_used_if_state_json_has_changed(tmp_path, server):
    server.put_folder(save(tmp_path / "set"), "set/")
    reading = gdsdata.Reading(index_cache=tmp_path / "cache")
    assert rows(server.url("set/"), reading=reading) == rows(server.url("set/"), reading=reading) == [0, 1, 2, 3]
    server.content["set/state.json"] = state_of(TWO[::-1]).encode()
    assert rows(server.url("set/"), reading=reading) == [2, 3, 0, 1]


@pytest.mark.parametrize("earlier", ["in the order of names", "with a cache"])
def test_a_state_of_other_rows_is_refused(tmp_path, earlier):
    names = ["z.arrow", "m.arrow"] if earlier == "in the order of names" else TWO
    folder = save(tmp_path / "saved", names, left=LEFT[:1] if earlier == "with a cache" else ())
    files = [path for path in folder.iterdir() if path.suffix == ".arrow"]
    then = gdsdata.GDSDataset(files, 1, device="cpu")
    next(iter(then))
    with pytest.raises(ValueError, match="the state is of another data set or order"):
        gdsdata.GDSDataset(folder, 1, device="cpu").load_state_dict(then.state_dict())


def test_a_state_of_the_same_rows_is_resumed(tmp_path):
    folder = save(tmp_path / "saved")
    then = gdsdata.GDSDataset([folder / name for name in TWO], 1, device="cpu")
    next(iter(then))
    state = then.state_dict()
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    now = gdsdata.GDSDataset(moved, 1, device="cpu")
    now.load_state_dict(state)
    assert len(list(now)) == 3


# ---------------------------------------------------------------------------------------- what Spark leaves in folders


SPARK = ["_SUCCESS", "_committed_12", "_started_12", "_metadata", "_common_metadata", ".part-0.parquet.crc"]
SPARK_FOLDERS = ["_temporary/0/_temporary/attempt_0_m_000000_0", "_spark_metadata", ".hidden"]


@pytest.mark.parametrize("name", [*SPARK, *(f"{folder}/part-1.parquet" for folder in SPARK_FOLDERS)])
@pytest.mark.parametrize("named", [{}, {"split": "train"}])
def test_other_files_of_spark_beside_parquet_are_no_data(tmp_path, server, name, named):
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "part-0.parquet")
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"x": [-1]}), tmp_path / name)
    server.put_folder(tmp_path, f"{tmp_path.name}/")
    for source in (tmp_path, server.url(f"{tmp_path.name}/")):
        assert rows(source, **named) == [1, 2]


def test_a_name_that_begins_with_an_underscore_is_data(tmp_path):
    for place, name in enumerate(["_a.npy", "b.npy"]):
        np.save(tmp_path / name, np.full(1, place))
    (batch,) = gdsdata.GDSDataset(tmp_path, 2, shuffle=False, device="cpu")
    assert batch.flatten().tolist() == [0, 1]
