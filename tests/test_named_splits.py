"""A split by name: which files it has, in every layout, format and kind of storage."""

import json
import shutil
import time
from itertools import combinations
from pathlib import Path

import pytest
from helpers import assert_same_batches, grouped, write_records
from hypothesis import given, settings
from hypothesis import strategies as st
from object_server import serving
from sources import SOURCES
from test_identity import flat, state_behind, unpacked_within  # noqa: F401 (a fixture)
from test_split import samples_of

import gdsdata
from gdsdata.formats import Records
from gdsdata.formats.listing import listing_of
from gdsdata.formats.named_splits import SPLIT_OF, common_folder, files_of_split, labels_of

ROOT = "/data/set"


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as server:
        yield server


def of(split: str, *files: str, root: str = ROOT) -> list[str]:
    found = files_of_split(split, root, [f"{root}/{name}" for name in files])
    return sorted(path.removeprefix(f"{root}/") for path in found)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_records(folder / name, 4, 8, len(name))


def listed(source, split: str) -> list[str]:
    root = source if isinstance(source, (str, Path)) else common_folder(list(map(str, source)))
    return [path.removeprefix(f"{root}/") for path in listing_of(source, split).paths]


# ------------------------------------------------------------------------------------------------------ conventions


@pytest.mark.parametrize(
    ("split", "files", "found"),
    [
        ("train", "train/0.bin test/0.bin", "train/0.bin"),
        ("test", "data/train/0.bin data/test/0.bin data/test/b/1.bin", "data/test/0.bin data/test/b/1.bin"),
        ("train", "train.parquet test.parquet", "train.parquet"),
        ("train", "my-train-file.parquet my-test-file.parquet", "my-train-file.parquet"),
        ("train", "train_0.parquet train_1.parquet test_0.parquet", "train_0.parquet train_1.parquet"),
        ("test", "train-00000-of-00002.arrow train-00001-of-00002.arrow test-00000-of-00001.arrow", None),
        ("train", "data/train-00000-of-00001-ab.parquet data/x-00000-of-00001.parquet", None),
        ("train_sft", "data/train_sft-00000-of-00001.parquet data/test_sft-00000-of-00001.parquet", None),
        ("train_sft", "train_sft-00000-of-00001.parquet train_gen-00000-of-00001.parquet", None),
        ("train_sft", "train_sft.parquet train_gen.parquet", None),
        ("train_sft", "train_sft/0.bin train_gen/0.bin", None),
        ("calibration", "train/0.bin calibration/0.bin", "calibration/0.bin"),
        ("random", "data/random-00000-of-00001.parquet", None),
        ("train", "imdb-train.arrow imdb-test.arrow dataset_info.json", "imdb-train.arrow"),
        ("train", "mnist-train.tfrecord-00000-of-00002 mnist-test.tfrecord-00000-of-00001", None),
        ("train", "train-000000.tar train-000001.tar val-000000.tar", "train-000000.tar train-000001.tar"),
        ("validation", "train-0.tar val-0.tar", "val-0.tar"),
        ("val", "train/0.bin valid/0.bin", "valid/0.bin"),
        ("dev", "data/validation-00000-of-00001.parquet data/train-00000-of-00001.parquet", None),
        ("test", "train/0.bin test/0.bin eval/0.bin", "test/0.bin"),
        ("eval", "train/0.bin test/0.bin eval/0.bin", "eval/0.bin"),
        ("train", "train/index.json train/a.mds train_small/index.json train_small/a.mds", None),
        ("val", "train/0.bin val_small/0.bin", "val_small/0.bin"),
        ("train", "train-clean-100/0.bin train-other-500/0.bin dev-clean/0.bin", None),
        ("train", "train/0.bin train.py test.py", "train/0.bin"),
        ("train", "train.bin train.py README.md", "train.bin"),
        ("train", "train/0.bin train.json", "train/0.bin"),  # another ending
        ("test", "train/train-test.bin test.bin", "test.bin"),
        ("train", "train/index.json train/0/index.json train/0/a.mds train/a.mds", "train/a.mds train/index.json"),
        ("train", "0.bin 1.bin README.md", "0.bin 1.bin"),
        ("training", "a/0.bin b/1.bin", "a/0.bin b/1.bin"),
        ("train", "test-of-us/train/0.bin", "test-of-us/train/0.bin"),
        ("train", "__pycache__/train.bin train.bin", "train.bin"),
    ],
)
def test_files_belong_to_a_split_by_their_names(split, files, found):
    marked = {"train_sft": "train_sft", "dev": "validation"}.get(split, split)
    expected = found.split() if found else [name for name in files.split() if marked in name]
    if split == "train" and "train_small" in files:
        expected = ["train/a.mds", "train/index.json"]
    assert of(split, *files.split()) == sorted(expected)


def test_the_folders_of_a_datasetdict_are_its_splits_by_their_exact_names():
    files = "dataset_dict.json train/state.json train/data-00000-of-00001.arrow train_sft/data-00000-of-00001.arrow"
    assert of("train_sft", *files.split()) == ["train_sft/data-00000-of-00001.arrow"]
    with pytest.raises(ValueError, match=r"has no such split, only 'train', 'train_sft': pass one"):
        of("test", *files.split())


@pytest.mark.parametrize("root", ["/data/set/test", "s3://bucket/test", "https://host/test", "s3://bucket/test/"])
def test_a_folder_that_is_called_as_a_split_is_that_split(root):
    files = [f"{root.rstrip('/')}/{i}.bin" for i in range(2)]
    for split in ("test", "eval"):
        assert files_of_split(split, root, files) == files
    with pytest.raises(ValueError, match="has no such split, only 'test'"):
        files_of_split("train", root, files)


def test_the_query_of_an_address_is_no_part_of_its_name():
    urls = [f"https://host/set/{name}?sig=a/test/{name}" for name in ("train.parquet", "val.parquet")]
    assert common_folder(urls) == "https://host/set"
    assert files_of_split("train", common_folder(urls), urls) == urls[:1]
    assert files_of_split("validation", common_folder(urls), urls) == urls[1:]


@pytest.mark.parametrize(
    ("split", "files", "words"),
    [
        (
            "val",
            "train/0.bin test/0.bin",
            r"split='val': /data/set has no such split, only 'test', 'train': pass one of",
        ),
        ("train", "data/train_sft-00000-of-00001.parquet train.py", "only 'train_sft': pass one of these, or name the"),
        ("test", "0.bin 1.bin", "no file or folder of /data/set is named for a split: name the folder or the files"),
        ("test", "data-00000-of-00002.arrow", "only 'data': pass one of these"),
        ("train", " ".join(f"test-{i:02}x/0.bin" for i in range(30)), r"'test-19x', \.\.\.: pass"),
        (
            "train",
            "train/0.parquet train.parquet",
            "the folder with .*/train/0.parquet or the file .*/set/train.parquet",
        ),
        ("validation", "val/0.bin dev.bin", "split='validation': /data/set has 'dev' and 'val': pass the one that is"),
        ("train", "train-eval.bin b.bin", "'train-eval' in /data/set has words for several splits: name the files"),
        ("test", "dev/test/0.bin train/0.bin", "'dev/test' in /data/set has words for several splits"),
        ("train", "README.md", "no file or folder"),
    ],
)
def test_a_split_that_names_do_not_show_is_refused_in_words(split, files, words):
    with pytest.raises(ValueError, match=words):
        of(split, *files.split())


WORDS = st.sampled_from([*SPLIT_OF, "data", "a", "sft", "calibration", "0", "2024"])
NAMES = st.lists(WORDS, min_size=1, max_size=3).flatmap(
    lambda words: st.sampled_from("-_. ").map(lambda s: s.join(words))
)
FILES = st.builds(
    "{}{}.{}".format, NAMES, st.sampled_from(["", "-00000-of-00001", "_3"]), st.sampled_from(["bin", "a"])
)
TREES = st.lists(
    st.builds(lambda folders, file: "/".join([*folders, file]), st.lists(NAMES, max_size=2), FILES),
    min_size=1,
    max_size=8,
    unique=True,
)


@given(TREES, st.booleans())
@settings(max_examples=1000, deadline=None)
def test_no_file_is_in_two_splits_and_none_is_invented(names, is_dict):
    files = [f"{ROOT}/{name}" for name in [*names, *["dataset_dict.json"] * is_dict]]
    labels = labels_of(ROOT, files)
    placed = labels.files()
    assert len(placed) == len(set(placed)) and set(placed) <= set(files)
    of_each = {}
    for split in {"train", "validation", "test", *SPLIT_OF, *labels.named()}:
        try:
            of_each[split] = set(files_of_split(split, ROOT, files))
        except ValueError as error:
            assert "split=" in str(error)
            continue
        assert of_each[split] and of_each[split] <= set(placed)
    for one, other in combinations(sorted(of_each), 2):
        if SPLIT_OF.get(one, one) != SPLIT_OF.get(other, other) and (
            (one in SPLIT_OF and other in SPLIT_OF) or (one in labels.named() and other in labels.named())
        ):
            assert not of_each[one] & of_each[other], (one, other)
    if labels.are_exact or labels.has_words():
        named = [path for split in labels.named() for path in of_each.get(split, ())]
        assert len(named) == len(set(named))  # each in one split, if each is called by its own name


# --------------------------------------------------------------------------------------------------- kinds of sources


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_folder_a_glob_and_a_list_have_the_same_splits(tmp_path, server, is_remote):
    write(tmp_path, "a/train/0.bin", "a/train/deep/1.bin", "a/test/0.bin", "a/.hidden/train/2.bin", "b/train-0.bin")
    server.put_folder(tmp_path)
    root = server.url().rstrip("/") if is_remote else str(tmp_path)
    wanted = ["train/0.bin", "train/deep/1.bin"]
    for source in (f"{root}/a", f"{root}/a/"):
        assert listed(source.rstrip("/"), "train") == wanted
        assert listing_of(source, "train").paths == [f"{root}/a/{name}" for name in wanted]
    assert listing_of(f"{root}/a/**/*.bin", "train").paths == [f"{root}/a/{name}" for name in wanted]
    assert listing_of(f"{root}/a/t*/0.bin", "test").paths == [f"{root}/a/test/0.bin"]
    assert listing_of(f"{root}/a/{{train,test}}/0.bin", "test").paths == [f"{root}/a/test/0.bin"]
    names = ["a/train/0.bin", "a/test/0.bin", "b/train-0.bin"]
    assert listing_of([f"{root}/{name}" for name in names], "test").paths == [f"{root}/a/test/0.bin"]
    assert listing_of([f"{root}/a", f"{root}/b"], "train").paths == [
        f"{root}/{name}" for name in ("a/train/0.bin", "a/train/deep/1.bin", "b/train-0.bin")
    ]
    for source in (f"{root}/a/train", f"{root}/a/train/*.bin", f"{root}/a/train/0.bin"):
        assert f"{root}/a/train/0.bin" in listing_of(source, "train").paths
        with pytest.raises(ValueError, match="only 'train'"):
            listing_of(source, "test")
    with pytest.raises(ValueError, match=f"split='test': {root}/b has no such split, only 'train'"):
        listing_of([f"{root}/a", f"{root}/b"], "test")
    with pytest.raises(FileNotFoundError):
        listing_of(f"{root}/c", "train")


def test_a_list_on_a_web_server_has_splits(server):
    for name in ("train-0.bin", "test-0.bin"):
        server.content[name] = bytes(32)
    server.content["all.txt"] = b"train-0.bin\ntest-0.bin\n"
    base = f"{server.address}/{server.bucket}"
    for source in (f"{base}/all.txt", [f"{base}/test-0.bin", f"{base}/train-0.bin"]):
        assert listing_of(source, "train").paths == [f"{base}/train-0.bin"]


def test_a_link_to_a_folder_above_is_not_followed(tmp_path):
    write(tmp_path, "train/0.bin")
    (tmp_path / "train" / "back").symlink_to(tmp_path)
    (tmp_path / "test").symlink_to(tmp_path / "train" / "back" / "elsewhere")
    write(tmp_path / "elsewhere", "1.bin")
    assert listed(tmp_path, "train") == ["train/0.bin"]
    assert listed(tmp_path, "test") == ["test/1.bin"]


@pytest.mark.parametrize("source", [".", "{}", "{}/", "../{0.name}"])
def test_a_folder_may_be_named_in_any_way(tmp_path, monkeypatch, source):
    write(tmp_path, "train/0.bin", "test/1.bin")
    monkeypatch.chdir(tmp_path)
    assert listing_of(source.format(tmp_path), "train").paths == [str(tmp_path / "train" / "0.bin")]


# ------------------------------------------------------------------------------------------------------------ README


CONFIGS = """---
license: mit
configs:
- config_name: {}
  data_files:
  - split: train
    path: a/*.bin
- config_name: {}
  data_files: b/*.bin
---
# A data set
"""


@pytest.mark.parametrize("text", ["---" + "\n" * 2**20, "---\n" + "-" * 2**20, "\xff" * 2**20, "---\n" * 2**18])
def test_a_readme_of_any_content_is_searched_at_once(tmp_path, text):
    write(tmp_path, "a/0.bin")
    (tmp_path / "README.md").write_text(text, encoding="latin-1")
    begun = time.monotonic()
    assert listed(tmp_path, "train") == ["a/0.bin"]
    assert time.monotonic() - begun < 5


def test_where_readme_declares_files_nothing_is_guessed(tmp_path):
    write(tmp_path, "a/0.bin", "b/0.bin")
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    assert listed(tmp_path, "train") == ["a/0.bin", "b/0.bin"]
    (tmp_path / "README.md").write_text(CONFIGS.format("x", "x"))
    with pytest.raises(ValueError, match=r"README.md declares files of splits, which is not read: name the folder"):
        listing_of(tmp_path, "train")
    write(tmp_path, "a/train.bin", "b/train.bin")
    assert listed(tmp_path, "train") == ["a/train.bin", "b/train.bin"]
    (tmp_path / "README.md").write_text(CONFIGS.format("en", "de"))
    with pytest.raises(
        ValueError, match=r"README.md declares several data sets \('de', 'en'\), and files of this split"
    ):
        listing_of(tmp_path, "train")
    (tmp_path / "b" / "train.bin").unlink()
    assert listed(tmp_path, "train") == ["a/train.bin"]


# ------------------------------------------------------------------------------------------------------- GDSDataset


def read(source, **arguments) -> gdsdata.GDSDataset:
    given = {"batch_size": 1, "device": "cpu", "ragged": "list", "shuffle": False, **arguments}
    return gdsdata.GDSDataset(source, **grouped(given))


@pytest.mark.parametrize("name", SOURCES)
def test_a_split_of_every_format_has_the_samples_of_its_folder(tmp_path, name):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        SOURCES[name].write(tmp_path / split)
    format = SOURCES[name].format()
    whole = samples_of(read(tmp_path / "train", format=format))
    assert samples_of(read(tmp_path, format=format, split="train")) == whole
    halves = [read(tmp_path, format=format, split=("train", *part)) for part in ((0, 0.5), (0.5, 1))]
    assert [sample for half in halves for sample in samples_of(half)] == whole


def test_objects_of_a_split_are_read_with_one_list(tmp_path, server):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        SOURCES["mds"].write(tmp_path / split)
    server.put_folder(tmp_path)
    assert samples_of(read(server.url(), split="train")) == samples_of(read(tmp_path, split="train"))
    assert server.lists == 1


RECORDS = Records("u1", (8,))


def test_a_state_of_one_split_is_refused_by_another_with_equal_names_and_sizes(tmp_path):
    write(tmp_path, "train/0.bin", "test/0.bin")
    first, second = (read(tmp_path, format=RECORDS, split=split) for split in ("train", "test"))
    state = json.loads(json.dumps(state_behind(first)))
    with pytest.raises(ValueError, match="the split was 'train' and is 'test'"):
        second.load_state_dict(state)
    rest = flat(first)
    shutil.move(tmp_path, moved := tmp_path.with_name(f"{tmp_path.name}-moved"))
    for source, split in ((moved, "train"), (moved / "train", (0, 1)), (moved / "train", "train")):
        again = read(source, format=RECORDS, split=split)
        again.load_state_dict(state)
        assert_same_batches(flat(again), rest[2:])


def test_a_kept_index_is_of_one_split(tmp_path, monkeypatch):
    monkeypatch.setattr("gdsdata.data.indexing.WORTH_S", -1)
    monkeypatch.setattr("gdsdata.formats.kept_index.SETTLED_NS", -(10**18))
    data, cache = tmp_path / "data", tmp_path / "cache"
    write(data, "train/0.bin", "test/00.bin")
    for _ in range(2):
        for split, name in (("train", "train/0.bin"), ("test", "test/00.bin")):
            got = samples_of(read(data, format=RECORDS, split=split, index_cache=cache))
            assert b"".join(got) == (data / name).read_bytes()
    assert len(list(cache.rglob("*.gdsdata-index"))) == 2
    write(data, "data/train-00000-of-00001.bin")  # it is the split from now on
    got = samples_of(read(data, format=RECORDS, split="train", index_cache=cache))
    assert b"".join(got) == (data / "data" / "train-00000-of-00001.bin").read_bytes()


def test_without_split_all_files_of_a_folder_are_read(tmp_path):
    write(tmp_path, "train.bin", "test.bin", "train/0.bin")
    assert len(samples_of(read(tmp_path, format=RECORDS))) == 8


def test_a_folder_of_folders_names_the_split(tmp_path):
    write(tmp_path, "images/0.bin", "test/0.bin")
    with pytest.raises(
        FileNotFoundError, match=r"only folders \('images', 'test'\): pass the name .* split='test'; or"
    ):
        read(tmp_path, format=RECORDS)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ("train[:90%]", r"is a slice, .*: write .* as in split=\('train', 0, 0.9\)"),
        ("train[10%:25%]", r"split=\('train', 0.1, 0.25\)"),
        ("train[:1000]", r"split=\('train', 0, 0.9\)"),
        ("", "is no name of a split"),
        (("train", 0.9, 0.1), "the part begins and ends within 0 and 1"),
        (("train", 0, 0.001), r"split=\('train', 0.0, 0.001\): of the 4 samples of .* it has none"),
    ],
)
def test_a_slice_is_refused_with_the_fractions_to_write(tmp_path, split, words):
    write(tmp_path, "train/0.bin")
    with pytest.raises(ValueError, match=words):
        read(tmp_path, format=RECORDS, split=split)


@pytest.mark.parametrize("split", [("train", 0.5), ("train", "0", 1), ("train", 0, 0.5, 1), {"train": 1}, None])
def test_another_type_is_refused_with_all_forms(tmp_path, split):
    write(tmp_path, "train/0.bin")
    with pytest.raises(TypeError, match=r"\(0, 0.9\); the name of a split: 'train'; or both: \('train', 0, 0.9\)"):
        read(tmp_path, format=RECORDS, split=split)
