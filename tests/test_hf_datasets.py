"""Folders that the package `datasets` of Hugging Face writes: values are those that it reads."""

import datetime
import decimal
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from test_named_splits import TREES

import gdsdata
from gdsdata.formats import Arrow, Parquet
from gdsdata.formats.listing import listing_of
from gdsdata.formats.named_splits import SPLIT_OF, labels_of, splits_in

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
datasets = pytest.importorskip("datasets", minversion="4.7")

ROWS = 7
KINDS = {
    "flag": datasets.Value("bool"),
    "image": datasets.Array2D((2, 3), "float32"),
    "rows": datasets.Array2D((None, 3), "int64"),
    "lists": datasets.List(datasets.List(datasets.Value("int32"))),
    "boxes": datasets.List(datasets.List(datasets.Value("float32"), length=4)),
    "texts": datasets.List(datasets.Value("string")),
    "messages": datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")}),
    "maybe": datasets.Value("int64"),
    "price": datasets.Value("decimal128(7, 2)"),
    "day": datasets.Value("date32"),
    "when": datasets.Value("timestamp[ms]"),
    "view": datasets.Value("string_view"),
    "large": datasets.Value("large_string"),
    "label": datasets.ClassLabel(names=["no", "yes"]),
}
DECODE = {"texts": "json", "messages": "json"}


def row(i):
    return {
        "flag": i % 2 == 0,
        "image": (np.arange(6).reshape(2, 3) + i).tolist(),
        "rows": [[i, 1, 2]] * (1 + i % 3),
        "lists": [[i], [], [i, i + 1]][: i % 4],
        "boxes": [[0.5, 1, i, 2]] * (i % 3),
        "texts": ["é", None, "a" * i][: i % 4],
        "messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": None}][: i % 3],
        "maybe": None if i == 2 else i,
        "price": decimal.Decimal(i) / 4,
        "day": datetime.date(2026, 1, 1 + i),
        "when": datetime.datetime(2026, 1, 1, 0, 0, i, 5000),
        "view": f"view {i} that is longer than twelve bytes",
        "large": "é" * i,
        "label": i % 2,
    }


@pytest.fixture(scope="module")
def made():
    return datasets.Dataset.from_list([row(i) for i in range(ROWS)], features=datasets.Features(KINDS))


def in_two_shards(made, folder):
    made.save_to_disk(folder / "data", num_shards=2)
    return folder / "data", Arrow


def of_a_dict(made, folder):
    datasets.DatasetDict({"train": made, "test": made.select([0])}).save_to_disk(folder / "data")
    return folder / "data" / "train", Arrow


def as_parquet(made, folder):
    made.to_parquet(folder / "data" / "0.parquet")
    (folder / "data" / "README.md").write_text("---\nlicense: mit\n---\n")
    return folder / "data", Parquet


WAYS = {"save_to_disk in two shards": in_two_shards, "a split of a DatasetDict": of_a_dict, "to_parquet": as_parquet}


@pytest.fixture(params=WAYS)
def batch(request, made, tmp_path):
    """Return all rows as one batch, and the rows that `datasets` reads."""
    folder, kind = WAYS[request.param](made, tmp_path)
    fields = gdsdata.Fields(decode=DECODE)
    format = kind(fill_null={"maybe": -100})
    (found,) = gdsdata.GDSDataset(folder, ROWS, format, shuffle=False, device="cpu", fields=fields)
    return found, made.to_list()


def test_every_column_has_the_values_that_the_package_reads(batch):
    found, rows = batch
    wanted = {name: [one[name] for one in rows] for name in KINDS}
    assert list(found) == list(KINDS)
    assert found["flag"].dtype == torch.bool and found["flag"].tolist() == wanted["flag"]
    assert found["image"].shape == (ROWS, 2, 3) and found["image"].tolist() == wanted["image"]
    assert found["rows"].values.tolist() == sum(wanted["rows"], [])
    assert found["rows"].offsets.diff().tolist() == list(map(len, wanted["rows"]))
    assert [[one.tolist() for one in lists] for lists in found["lists"].as_list()] == wanted["lists"]
    assert [one.tolist() for one in found["boxes"].as_list()] == wanted["boxes"]
    assert (found["texts"], found["messages"]) == (wanted["texts"], wanted["messages"])
    assert found["maybe"].tolist() == [-100 if one is None else one for one in wanted["maybe"]]
    assert found["price"].dtype == torch.float64 and found["price"].tolist() == list(map(float, wanted["price"]))
    assert found["label"].tolist() == wanted["label"]
    for name in ("view", "large"):
        assert [bytes(one.tolist()).decode() for one in found[name].as_list()] == wanted[name]


def test_dates_and_times_are_days_and_units_since_1970(batch):
    found, rows = batch
    first = datetime.datetime(1970, 1, 1)
    assert found["day"].tolist() == [(one["day"] - first.date()).days for one in rows]
    assert found["when"].tolist() == [(one["when"] - first) // datetime.timedelta(milliseconds=1) for one in rows]


@pytest.mark.parametrize("way", WAYS)
def test_nulls_among_numbers_name_the_option_that_fills_them(made, tmp_path, way):
    folder, _ = WAYS[way](made, tmp_path)
    with pytest.raises(ValueError, match=r"column 'maybe' has nulls.*fill_null=\{'maybe': -100\}"):
        list(gdsdata.GDSDataset(folder, ROWS, device="cpu"))


def test_the_root_of_a_datasetdict_names_the_splits(made, tmp_path):
    of_a_dict(made, tmp_path)
    with pytest.raises(
        ValueError, match=r"is a DatasetDict, .*\('train', 'test'\): pass the name .* split='train', or"
    ):
        gdsdata.GDSDataset(tmp_path / "data", ROWS, device="cpu")


# ------------------------------------------------------------------------------------------------------------ caches


def transform(loaded):
    """Do what leaves files beside the data."""
    loaded.map(lambda row: {"x": row["x"] + 100})
    loaded.filter(lambda row: row["x"] > 3)
    loaded.shuffle(seed=1)
    loaded.sort("x", reverse=True)
    loaded.train_test_split(0.5)


@pytest.fixture(scope="module")
def numbers():
    return datasets.Dataset.from_dict({"x": list(range(12))})


def test_files_that_transforms_leave_in_a_saved_folder_are_no_rows(numbers, tmp_path):
    numbers.save_to_disk(tmp_path / "saved", num_shards=3)
    loaded = datasets.load_from_disk(tmp_path / "saved")
    for step in (lambda row: {"x": row["x"] + 100}, lambda row: {"x": row["x"] + 200}):
        loaded.map(step)
        (batch,) = gdsdata.GDSDataset(tmp_path / "saved", 100, shuffle=False, device="cpu")
        assert batch["x"].tolist() == list(range(12))
    transform(loaded)
    assert len(list((tmp_path / "saved").glob("cache-*.arrow"))) >= 6
    (batch,) = gdsdata.GDSDataset(tmp_path / "saved", 100, shuffle=False, device="cpu")
    assert batch["x"].tolist() == datasets.load_from_disk(tmp_path / "saved")["x"][:] == list(range(12))


def test_files_that_transforms_leave_in_the_splits_of_a_datasetdict_are_no_rows(numbers, tmp_path):
    datasets.DatasetDict({"train": numbers, "test": numbers.select([5, 1])}).save_to_disk(tmp_path / "saved")
    loaded = datasets.load_from_disk(tmp_path / "saved")
    for split in loaded:
        transform(loaded[split])
        assert list((tmp_path / "saved" / split).glob("cache-*.arrow"))
        assert rows_of(tmp_path / "saved", split) == loaded[split]["x"][:]


def test_files_that_transforms_leave_in_the_folder_of_a_built_data_set_are_no_rows(numbers, tmp_path):
    numbers.to_parquet(tmp_path / "0.parquet")
    built = datasets.load_dataset("parquet", data_files=str(tmp_path / "0.parquet"), cache_dir=str(tmp_path / "cache"))
    folder = os.path.dirname(built["train"].cache_files[0]["filename"])
    transform(built["train"])
    assert any(name.startswith("cache-") for name in os.listdir(folder))
    (batch,) = gdsdata.GDSDataset(folder, 100, shuffle=False, device="cpu")
    assert batch["x"].tolist() == rows_of(folder, "train") == list(range(12))


@pytest.mark.parametrize("change", ["select", "shuffle", "concatenate", "columns"])
def test_rows_that_were_chosen_before_they_were_saved_are_those_that_load_from_disk_gives(numbers, tmp_path, change):
    changed = {
        "select": lambda: numbers.select([7, 2, 2, 9]),
        "shuffle": lambda: numbers.shuffle(seed=3),
        "concatenate": lambda: datasets.concatenate_datasets([numbers.select([8, 1]), numbers]),
        "columns": lambda: numbers.with_format("torch", columns=["x"]),
    }[change]()
    changed.save_to_disk(tmp_path / "saved", num_shards=2)
    loaded = datasets.load_from_disk(tmp_path / "saved").with_format(None)
    (batch,) = gdsdata.GDSDataset(tmp_path / "saved", 100, shuffle=False, device="cpu")
    assert batch["x"].tolist() == loaded["x"][:] == changed.with_format(None)["x"][:]


# ------------------------------------------------------------------------------------------------------------ splits


def rows_of(folder, split):
    (batch,) = gdsdata.GDSDataset(folder, 100, split=split, shuffle=False, device="cpu")
    return batch["x"].tolist()


def test_splits_of_a_datasetdict_are_those_that_load_from_disk_gives(tmp_path):
    rows = {"train": [1, 2, 3], "validation": [4], "train_sft": [5, 6]}
    made = datasets.DatasetDict({name: datasets.Dataset.from_dict({"x": some}) for name, some in rows.items()})
    made.save_to_disk(tmp_path, num_shards={"train": 2, "validation": 1, "train_sft": 1})
    loaded = datasets.load_from_disk(tmp_path)
    for split in rows:
        assert rows_of(tmp_path, split) == loaded[split]["x"][:]


@pytest.mark.parametrize(
    "names",
    [
        "train/0 train/1 test/0",
        "data/train/0 data/train/b/1 data/valid/0",
        "train val test",
        "my-train-file my-test-file",
        "train_0 train_1 test_0",
        "train-00000-of-00002 train-00001-of-00002 test-00000-of-00001",
        "data/train-00000-of-00002 data/train-00001-of-00002 data/random-00000-of-00001",
        "data/train_sft-00000-of-00001 data/test_sft-00000-of-00001",
        "train-clean/0 train-other/0 dev/0",
        "train/0 train/test-1 test/0",
        "a b/c",
    ],
)
def test_a_split_of_a_folder_has_the_rows_that_load_dataset_gives(tmp_path, names):
    for number, name in enumerate(names.split()):
        path = tmp_path / "data" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_dict({"x": [number]}).to_parquet(path)
    folder = str(tmp_path / "data")
    loaded = datasets.load_dataset(folder, cache_dir=str(tmp_path / "cache"))
    for split, rows in loaded.items():
        assert sorted(rows_of(folder, split)) == sorted(rows["x"][:])


def of_package(folder):
    patterns = datasets.data_files.get_data_patterns(str(folder))
    found = datasets.data_files.DataFilesDict.from_local_or_remote(patterns, str(folder))
    return {str(split): {os.path.relpath(path, folder) for path in paths} for split, paths in found.items()}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(names=TREES)
def test_a_split_has_the_files_that_the_package_gives_it_alone(tmp_path_factory, names):
    """The package puts some files into two splits: these are in one, or refused."""
    folder = tmp_path_factory.mktemp("data")
    for name in names:
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
        except OSError:  # a file cannot be a folder too
            continue
    try:
        wanted = of_package(folder)
    except ValueError as error:
        assert "Split name should match" in str(error)
        return
    labels = labels_of(str(folder), [str(path) for path in folder.rglob("*") if path.is_file()])
    for split, files in wanted.items():
        of_others = set().union(*(some for other, some in wanted.items() if other != split))
        if files <= of_others:
            continue
        try:
            got = {os.path.relpath(path, folder) for path in listing_of(folder, split).paths}
        except ValueError as error:
            refusals = (" could be ", " words for several ", "' and '")
            assert any(words in str(error) for words in refusals)
            continue
        own = [label for label in labels.all() if SPLIT_OF.get(label) == split]
        if not own or len([label for label in labels.all() if split in splits_in(label)]) == 1:
            assert got <= files and files - got <= of_others
        else:  # a name that is such a word is preferred to names that only have one
            with_own = {path for one in own for path in (*labels.in_folders.get(one, ()), *labels.by_name.get(one, ()))}
            assert got <= {os.path.relpath(path, folder) for path in with_own}
