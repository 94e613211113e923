"""Folders that the package `datasets` of Hugging Face writes: values are those that it reads."""

import datetime
import decimal
import os

import numpy as np
import pytest
import torch

import gdsdata
from gdsdata.formats import Arrow, Parquet

os.environ.setdefault("HF_HUB_OFFLINE", "1")
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
    with pytest.raises(ValueError, match=r"is a DatasetDict, .*\('train', 'test'\): name the folder"):
        gdsdata.GDSDataset(tmp_path / "data", ROWS, device="cpu")
