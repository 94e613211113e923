"""Arrow files and streams: rows are pyarrow's, and false values in a file are refused."""

import contextlib
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from helpers import few_bytes_of_python
from tables import awkward, damaged, pa, read_all, rows_of, with_integers_of_128_bits

import gdsdata
from gdsdata.errors import CorruptData
from gdsdata.formats import Arrow, arrow, recognise
from gdsdata.formats.fields import Field

pytestmark = pytest.mark.usefixtures("quick_programs")

WRITERS = {"stream": pa.ipc.new_stream, "file": pa.ipc.new_file}


def write(path, table, kind="stream", rows_a_batch=7, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    with WRITERS[kind](str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)
    return str(path)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("rows_a_batch", [1, 7, 1000])
def test_rows_are_those_that_pyarrow_reads(tmp_path, kind, rows_a_batch):
    table = awkward(41)
    write(tmp_path / "a.arrow", table, kind, rows_a_batch)
    assert read_all(tmp_path / "a.arrow") == rows_of(table)


def test_files_follow_one_another_and_may_be_empty(tmp_path):
    tables = [awkward(rows, seed) for seed, rows in enumerate((3, 0, 10))]
    for i, table in enumerate(tables):
        write(tmp_path / f"{i}.arrow", table, "file" if i % 2 else "stream")
    assert read_all(tmp_path) == rows_of(pa.concat_tables(tables))


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("rows", [0, 41])
def test_a_file_whose_first_message_has_no_frame_is_read_by_its_footer(tmp_path, rows, compression):
    table = awkward(rows).append_column("kind", pa.array(["a", "b"] * rows).dictionary_encode()[:rows])
    write(path := tmp_path / "a.arrow", table, "file", compression=compression)
    content = bytearray(path.read_bytes())
    metadata_bytes = int.from_bytes(content[12:16], "little")
    content[8 : 16 + metadata_bytes] = content[16 : 16 + metadata_bytes] + bytes(8)  # as polars 2.1 writes
    path.write_bytes(content)
    assert pa.ipc.open_file(path).read_all() == table
    write(tmp_path / "b.arrow", other := awkward(3).append_column("kind", pa.array(["c"] * 3)))
    plain = table.set_column(len(other.columns) - 1, "kind", table["kind"].cast(pa.string()))
    assert read_all(tmp_path) == rows_of(pa.concat_tables([plain, other]))
    footer_bytes = int.from_bytes(content[-10:-6], "little")
    for at in range(len(content) - 10 - footer_bytes, len(content) - 6):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :])
        with contextlib.suppress(CorruptData, ValueError):
            gdsdata.GDSDataset(path, format=Arrow(), device="cpu")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_files_are_opened_side_by_side_if_the_storage_is_slow(tmp_path, monkeypatch, compression):
    tables = [pa.table({"id": [i]}) for i in range(10)]
    paths = [write(tmp_path / f"{i}.arrow", table, compression=compression) for i, table in enumerate(tables)]
    all_open, open_file = threading.Barrier(4, timeout=20), arrow.open_file

    def slow_open(path):
        if path == paths[1]:
            time.sleep(0.2)
        elif path != paths[0]:
            all_open.wait()
        return open_file(path)

    monkeypatch.setattr(arrow, "open_file", slow_open)
    assert len(Arrow().index(paths)) == 10
    assert read_all(paths) == {"id": list(range(10))}


def test_a_shuffled_epoch_has_every_row_once(tmp_path):
    write(tmp_path / "a.arrow", pa.table({"id": range(100), "text": [str(i) for i in range(100)]}))
    batches = gdsdata.GDSDataset(tmp_path, batch_size=16, device="cpu", fields=gdsdata.Fields(decode={"text": "txt"}))
    pairs = [pair for batch in batches for pair in zip(batch["id"].tolist(), batch["text"], strict=True)]
    assert sorted(pairs) == [(i, str(i)) for i in range(100)] and pairs != sorted(pairs)


def test_dtypes_and_shapes_are_the_columns(tmp_path):
    path = write(tmp_path / "a.arrow", awkward(4))
    fields = {field.name: (field.dtype, field.shape) for field in Arrow().index([path]).fields}
    assert fields == {
        "i64": (np.dtype("i8"), ()),
        "u8": (np.dtype("u1"), ()),
        "f16": (np.dtype("f2"), ()),
        "day": (np.dtype("i4"), ()),
        "time": (np.dtype("i8"), ()),
        "box": (np.dtype("f4"), (2, 3)),
        "hash": (np.dtype("u1"), (5,)),
        "text": (None, None),
        "blob": (None, None),
        "tokens": (np.dtype("u2"), None),
        "far": (np.dtype("f8"), None),
        "image.bytes": (None, None),
        "image.path": (None, None),
        "image.in.w": (None, None),
    }


def test_null_is_a_field_that_the_sample_lacks(tmp_path):
    path = write(tmp_path / "a.arrow", pa.table({"text": ["a", None, ""]}))
    assert Arrow().index([path]).length_bytes.tolist() == [[1], [-1], [0]]


def test_fixed_shape_tensors_have_their_shape(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    table = pa.table({"t": pa.FixedShapeTensorArray.from_numpy_ndarray(values)})
    write(tmp_path / "a.arrow", table, rows_a_batch=3)
    (batch,) = gdsdata.GDSDataset(tmp_path / "a.arrow", batch_size=4, shuffle=False, device="cpu")
    assert torch.equal(batch["t"], torch.from_numpy(values))


def test_columns_choose_and_order_fields_and_leave_out_what_cannot_be_read(tmp_path):
    table = pa.table(
        {
            "either": pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])]),
            "one": pa.UnionArray.from_dense(
                pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [pa.array([1, 2])]
            ),
            "words": pa.DictionaryArray.from_arrays([0, 0], pa.array([["a"]])),
            "map": pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int8())),
            "nothing": pa.nulls(2),
            "cost": pa.array([1, 2], pa.decimal128(5, 2)),
            "deep": [[[1]], [[2, 3]]],
            "boxes": [[{"x": 1}], []],
            "flag": [True, False],
            "b": [3, 4],
            "a": ["x", "yy"],
        }
    )
    write(tmp_path / "a.arrow", table)
    assert read_all(tmp_path, format=Arrow(columns=["a", "b"])) == {"a": [[120], [121, 121]], "b": [3, 4]}
    assert read_all(tmp_path, format=Arrow(columns=["flag", "b"])) == {"flag": [True, False], "b": [3, 4]}
    for name in table.column_names[:3]:
        with pytest.raises(ValueError, match=f"column '{name}' (is|has)") as caught:
            Arrow(columns=(name,)).index([str(tmp_path / "a.arrow")])
        assert "columns=()" not in str(caught.value)  # which is refused too


LIST_VIEW, LARGE_LIST_VIEW = pa.list_view(pa.string()), pa.large_list_view(pa.int8())


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("kind", WRITERS)
def test_list_views_and_run_ends_may_be_left_out(tmp_path, kind, compression):
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 9], pa.int16()), pa.array(["x", None, "y"]))
    views = pa.array([["a", None], None, []] * 3, LIST_VIEW)
    table = pa.table(
        {
            "runs": runs,
            "views": views,
            "large": pa.array([[1, 2, 3], [], None] * 3, LARGE_LIST_VIEW),
            "id": range(9),
            "in": pa.StructArray.from_arrays([runs, pa.array([True, False, True] * 3), views], ["r", "flag", "v"]),
            "text": list("abcdefghi"),
        }
    )
    path = write(tmp_path / "a.arrow", table, kind, 4, compression=compression)
    assert read_all(path, format=Arrow(columns=("id", "text"))) == rows_of(table.select(["id", "text"]))
    flags = read_all(path, format=Arrow(columns=("text", "in.flag")))
    assert flags == {**rows_of(table.select(["text"])), "in.flag": [True, False, True] * 3}
    for name in ("runs", "views", "large", "in.r", "in.v"):
        with pytest.raises(ValueError, match=f"column '{name}' is of the type .*, which has no form in a batch"):
            Arrow(columns=(name, "id")).index([path])


@pytest.mark.parametrize("columns", [("id", "text"), ("id", "flag")])
@pytest.mark.parametrize("kind", WRITERS)
def test_unions_and_run_ends_that_an_older_arrow_wrote_may_be_left_out(tmp_path, kind, columns):
    ids, texts = pa.array([1, 2]), pa.array(["a", None])
    either = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [ids, texts])
    table = pa.table(
        {
            "either": either,
            "one": pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [ids]),
            "in": pa.StructArray.from_arrays([either, ids], ["either", "id"]),
            "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int16()), pa.array([7])),
            "id": [3, 4],
            "text": ["x", None],
            "flag": [True, False],
        }
    )
    path = write(tmp_path / "a.arrow", table, kind, metadata_version=pa.ipc.MetadataVersion.V4)
    assert read_all(path, format=Arrow(columns=columns)) == rows_of(table.select(columns))
    assert read_all(path, format=Arrow(columns=(*columns, "in.id"))) == {
        **rows_of(table.select(columns)),
        "in.id": [1, 2],
    }


@pytest.mark.parametrize("kind", WRITERS)
def test_the_format_of_2019_is_refused_with_a_remedy(tmp_path, kind):
    path = write(tmp_path / "a.arrow", awkward(3), kind, use_legacy_format=True)
    with pytest.raises(ValueError, match="before version 0.15") as caught:
        Arrow().index([path])
    assert not isinstance(caught.value, CorruptData) and path in str(caught.value)


def test_the_name_of_a_struct_means_its_members(tmp_path):
    path = write(tmp_path / "a.arrow", awkward(3))
    names = [field.name for field in Arrow(columns=("image", "u8")).index([path]).fields]
    assert names == ["image.bytes", "image.path", "image.in.w", "u8"]


@pytest.mark.parametrize(
    "table, options, said",
    [
        (pa.table({"x": [1, None]}), {}, "column 'x' has nulls.*fill_null"),
        (pa.table({"x": pa.array([[1, None]], pa.list_(pa.int8()))}), {}, "column 'x' has nulls"),
        (pa.table({"x": pa.array([[1, None]], pa.list_(pa.int8(), 2))}), {}, "column 'x' has nulls"),
        (pa.table([[1], [2]], names=["x", "x"]), {}, "two columns 'x'"),
        (pa.table({}), {}, "no columns"),
    ],
)
def test_a_table_that_makes_no_tensors_is_refused_with_the_reason(tmp_path, table, options, said):
    path = write(tmp_path / "a.arrow", table, **options)
    with pytest.raises(ValueError, match=said) as caught:
        Arrow().index([path])
    assert not isinstance(caught.value, CorruptData) and path in str(caught.value)


def test_missing_columns_wrong_lists_of_columns_and_unlike_files_are_errors(tmp_path):
    paths = [write(tmp_path / f"{i}.arrow", table) for i, table in enumerate((pa.table({"x": [1]}), awkward(1)))]
    with pytest.raises(ValueError, match="no column 'y': it has 'x'"):
        Arrow(columns=("y",)).index(paths)
    with pytest.raises(ValueError, match="separate datasets"):
        Arrow().index(paths)
    for wrong in ("x", (), ("x", "x")):
        with pytest.raises(ValueError, match="each once"):
            Arrow(columns=wrong)


@pytest.mark.parametrize("name", ["data-00000-of-00001.arrow", "imdb-train.arrow"])
def test_a_folder_of_hugging_face_is_recognized(tmp_path, name):
    write(tmp_path / name, pa.table({"text": ["a", "b"]}))
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "README.md").write_text("# A data set")
    assert read_all(tmp_path) == {"text": [[97], [98]]}


def test_a_folder_of_splits_is_refused_with_their_names(tmp_path):
    write(tmp_path / "train" / "data-00000-of-00001.arrow", pa.table({"x": [1]}))
    path = tmp_path / "dataset_dict.json"
    path.write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match=rf"\('train', 'test'\): pass .* split='train', or .* '{tmp_path}/train'"):
        gdsdata.GDSDataset(tmp_path, device="cpu")
    for other in ("", "[]", '{"splits": 3}', '{"splits": [[]]}', "[" * 10**5):
        path.write_text(other)
        with pytest.raises(ValueError, match="is a DatasetDict, whose splits"):
            gdsdata.GDSDataset(tmp_path, device="cpu")
        assert gdsdata.GDSDataset(tmp_path, split="train", device="cpu").samples == 1  # by the names of folders


def test_a_folder_with_a_readme_alone_says_where_data_may_be(tmp_path):
    (tmp_path / "README.md").write_text("# A data set")
    with pytest.raises(ValueError, match=r"has no files with data, only README.md: .*/\*\*/\*.parquet"):
        gdsdata.GDSDataset(tmp_path, device="cpu")


def test_a_file_is_recognized_by_its_magic(tmp_path):
    assert recognise([write(tmp_path / "any", pa.table({"x": [1]}), "file")]) == Arrow()


def test_without_pyarrow_the_error_names_the_extra(tmp_path):
    write(tmp_path / "a.arrow", pa.table({"x": [1]}))
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "import gdsdata\n"
        f"try: gdsdata.GDSDataset({str(tmp_path)!r}, device='cpu')\n"
        "except ImportError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "pip install 'gdsdata[tables]'" in ran.stdout, ran.stderr


@pytest.mark.parametrize("kind", WRITERS)
def test_a_schema_that_pyarrow_does_not_know_is_not_called_damaged(tmp_path, kind):
    table = pa.table({"wide": pa.array([1, 2], pa.int64())})
    path = write(tmp_path / "a.arrow", table, kind)
    schema = table.schema.serialize().to_pybytes()
    content = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(content.replace(schema, with_integers_of_128_bits(schema)))
    with pytest.raises(ValueError, match=f"{path}: .*pyarrow.*more than 64 bits.*cast") as caught:
        gdsdata.GDSDataset(path, 1, device="cpu")
    assert not isinstance(caught.value, CorruptData)


class TestDamage:
    @pytest.mark.parametrize("kind", WRITERS)
    def test_a_file_cut_short_anywhere_is_corrupt(self, tmp_path, kind):
        path = tmp_path / "a.arrow"
        write(path, awkward(9), kind)
        sound = path.read_bytes()
        for length in {0, 1, 7, 8, 9, len(sound) - 1, *range(0, len(sound), 97)}:
            path.write_bytes(sound[:length])
            with pytest.raises(CorruptData) as caught:
                Arrow().index([str(path)])
            assert caught.value.path == str(path)

    def test_bytes_behind_a_streams_end_are_corrupt(self, tmp_path):
        path = tmp_path / "a.arrow"
        write(path, awkward(9))
        path.write_bytes(path.read_bytes() * 2)
        with pytest.raises(CorruptData, match="end mark"):
            Arrow().index([str(path)])

    @pytest.mark.parametrize("kind", WRITERS)
    def test_no_damage_of_metadata_makes_an_extent_leave_its_file(self, tmp_path, kind):
        """There are no checksums, so damage may give other rows, but no extent outside the file."""
        path = tmp_path / "a.arrow"
        write(path, awkward(20), kind)
        sound, rng = path.read_bytes(), random.Random(kind)
        for _ in range(4):
            with few_bytes_of_python(32 * 2**20):  # begins without the garbage of the errors before
                for _ in range(50):
                    path.write_bytes(damaged(sound, rng))
                    self.index_or_refuse(path)

    def index_or_refuse(self, path):
        try:
            index = Arrow().index([str(path)])
        except ValueError as error:  # includes CorruptData
            assert str(path) in str(error)
        else:
            there = index.length_bytes >= 0
            assert (index.begin_bytes[there] >= 0).all() and (index.length_bytes >= -1).all()
            assert (index.begin_bytes[there] + index.length_bytes[there] <= index.size_bytes[0]).all()

    def test_a_length_of_metadata_that_lies_is_not_read(self, tmp_path):
        path = tmp_path / "a.arrow"
        with open(path, "wb") as stream:
            stream.write(b"\xff\xff\xff\xff" + (2**31 - 8).to_bytes(4, "little"))
            stream.truncate(2**33)  # so long that the length fits
        with few_bytes_of_python(2**20), pytest.raises(CorruptData, match="no message begins here"):
            Arrow().index([str(path)])

    def test_a_field_name_and_dtype_stay_with_their_values(self, tmp_path):
        path = write(tmp_path / "a.arrow", pa.table({"x": pa.array([5, 6], pa.int32())}))
        index = Arrow().index([path])
        begin = index.begin_bytes[:, 0]
        content = (tmp_path / "a.arrow").read_bytes()
        assert index.fields == (Field("x", np.dtype("i4"), ()),)
        assert [int.from_bytes(content[at : at + 4], "little") for at in begin] == [5, 6]
