"""Columns that are decoded, of Arrow and of Parquet: values are pyarrow's, whatever their type."""

import base64
import datetime
import decimal
import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tables import pa

import gdsdata
from gdsdata.errors import CorruptData
from gdsdata.formats import Arrow, Parquet
from gdsdata.formats.tables import TableIndex

pq = pytest.importorskip("pyarrow.parquet")

EXAMPLES = int(os.environ.get("GDSDATA_EXAMPLES", "15"))  # more find more

FORMATS = {".arrow": Arrow, ".parquet": Parquet}


def write(path, table, rows_a_batch=3, file_format=False, **options):
    """Write a table as the path's ending says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows_a_batch)
        return path
    new = pa.ipc.new_file if file_format else pa.ipc.new_stream
    with new(str(path), table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows_a_batch)
    return path


def as_python(value):
    if isinstance(value, gdsdata.Ragged):
        value = value.as_list()
    return [as_python(one) for one in value] if isinstance(value, list) else value.tolist()


def read(path, format=None, batch_size=4, **fields):
    """Return the values of each column, in the order of the file."""
    data = gdsdata.GDSDataset(path, batch_size, format, shuffle=False, device="cpu", fields=gdsdata.Fields(**fields))
    rows = {}
    for batch in data:
        for name, values in batch.items():
            rows.setdefault(name, []).extend(values if isinstance(values, list) else as_python(values))
    return rows


# ------------------------------------------------------------------------------------------------------ drawn tables

NUMBERS = {
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-128, 127),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.decimal128(7, 2): st.integers(-(10**6), 10**6).map(lambda cents: decimal.Decimal(cents) / 100),
    pa.date32(): st.integers(0, 10**5).map(lambda day: datetime.date(1970, 1, 1) + datetime.timedelta(day)),
    pa.timestamp("ms"): st.integers(0, 10**12),
    pa.duration("s"): st.integers(-(10**6), 10**6),
}
TEXTS = {kind: st.text(st.characters(codec="utf-8"), max_size=20) for kind in (pa.string(), pa.large_string())}
BYTES = {kind: st.binary(max_size=20) for kind in (pa.binary(), pa.large_binary())}
VIEWS = {pa.string_view(): TEXTS[pa.string()], pa.binary_view(): BYTES[pa.binary()]}


def lists_of(kinds, size=None):
    """Draw a type of lists of what ``kinds`` draws, and what draws its values."""

    def of(drawn):
        kind, value = drawn
        if size is not None:
            return pa.list_(kind, size), st.lists(value, min_size=size, max_size=size)
        return st.sampled_from([pa.list_(kind), pa.large_list(kind)]).map(
            lambda one: (one, st.lists(value, max_size=3))
        )

    return kinds.flatmap(lambda drawn: of(drawn) if size is None else st.just(of(drawn)))


def sometimes_null(kinds):
    return kinds.map(lambda drawn: (drawn[0], st.none() | drawn[1]))


def structs_of(kinds):
    def of(members):
        kind = pa.struct([(f"m{i}", one) for i, (one, _) in enumerate(members)])
        return kind, st.fixed_dictionaries({f"m{i}": value for i, (_, value) in enumerate(members)})

    return st.lists(kinds, min_size=1, max_size=2).map(of)


numbers = st.sampled_from(list(NUMBERS.items()))
leaves = st.sampled_from(list({**NUMBERS, **TEXTS, **BYTES}.items()))
nested_numbers = lists_of(sometimes_null(lists_of(numbers))) | lists_of(lists_of(numbers, 2))
anything = sometimes_null(st.recursive(leaves, lambda inner: structs_of(inner) | lists_of(inner), max_leaves=4))
nested = lists_of(sometimes_null(st.sampled_from(list(TEXTS.items())) | structs_of(anything)))
columns = (
    numbers
    | lists_of(numbers, 2)
    | sometimes_null(lists_of(numbers))
    | sometimes_null(nested_numbers)
    | sometimes_null(st.sampled_from(list({**TEXTS, **BYTES}.items())))
    | sometimes_null(nested)
)


@st.composite
def tables(draw, kinds=columns):
    rows, drawn = draw(st.integers(1, 9)), draw(st.lists(kinds, min_size=1, max_size=3))
    made = {}
    for i, (kind, value) in enumerate(drawn):
        made[f"c{i}"] = pa.array([draw(value) for _ in range(rows + 1)], kind)
    return pa.table(made).slice(1)


def is_text(kind):
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_ragged(kind):
    """Return whether a column of this type is numbers, or lists of them."""
    while hasattr(kind, "value_type"):
        kind = kind.value_type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return True
    return not is_text(kind) and not pa.types.is_nested(kind)


def number_of(kind, value):
    """Return a number as tensors and JSON have it."""
    if isinstance(value, decimal.Decimal):
        return float(value)
    if pa.types.is_temporal(kind):
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        return pa.array([value], kind).cast(width)[0].as_py()
    return value


def ragged_of(kind, value):
    """Return what a batch has of a value of numbers, bytes or texts."""
    if isinstance(value, str):
        return list(value.encode())
    if value is None or isinstance(value, bytes):
        return list(value or b"")
    return [ragged_of(kind.value_type, one) for one in value] if isinstance(value, list) else number_of(kind, value)


def json_of(kind, value):
    """Return what the JSON of a value says."""
    if isinstance(value, dict):
        return {name: json_of(kind.field(name).type, one) for name, one in value.items()}
    if isinstance(value, list):
        return [json_of(kind.value_type, one) for one in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return None if value is None else number_of(kind, value)


def check_values(path, table, **arguments):
    is_json = [not is_ragged(column.type) and not is_text(column.type) for column in table.columns]
    names = [name for name, decoded in zip(table.column_names, is_json, strict=True) if decoded]
    found = read(path, decode=dict.fromkeys(names, "json"), **arguments)
    for name, column in zip(table.column_names, table.columns, strict=True):
        form = json_of if name in names else ragged_of
        assert found[name] == [form(column.type, value) for value in column.to_pylist()], (name, column.type)


class TestValues:
    @pytest.mark.parametrize("suffix", FORMATS)
    @given(table=tables(), rows_a_batch=st.integers(1, 5), file_format=st.booleans())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def test_are_pyarrows(self, tmp_path_factory, suffix, table, rows_a_batch, file_format):
        folder = tmp_path_factory.mktemp("t")
        check_values(write(folder / f"a{suffix}", table, rows_a_batch, file_format), table)

    @given(table=tables(columns | st.sampled_from(list(VIEWS.items()))), codec=st.sampled_from([None, "lz4", "zstd"]))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def test_of_views_and_of_compressed_batches_are_pyarrows(self, tmp_path_factory, table, codec):
        path = write(tmp_path_factory.mktemp("t") / "a.arrow", table, compression=codec)
        check_values(path, table)

    @pytest.mark.parametrize("suffix", FORMATS)
    @given(table=tables(sometimes_null(numbers | lists_of(sometimes_null(numbers)))), fill=st.sampled_from([0, 1]))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def test_take_the_place_of_nulls_where_that_is_asked_for(self, tmp_path_factory, suffix, table, fill):
        def filled(kind, value, fill=fill):
            if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                return [filled(kind.value_type, one) for one in value or []]
            return fill if value is None else ragged_of(kind, value)

        path = write(tmp_path_factory.mktemp("t") / f"a{suffix}", table)
        found = read(path, FORMATS[suffix](fill_null=fill))
        for name, column in zip(table.column_names, table.columns, strict=True):
            assert found[name] == [filled(column.type, value) for value in column.to_pylist()]


@pytest.fixture(params=FORMATS)
def suffix(request):
    return request.param


class TestForms:
    def test_of_lists_of_lists_are_ragged_within_ragged(self, tmp_path, suffix):
        table = pa.table({"x": pa.array([[[1, 2], []], [], [[3]]], pa.list_(pa.list_(pa.int32())))})
        (batch,) = gdsdata.GDSDataset(write(tmp_path / f"a{suffix}", table), 3, shuffle=False, device="cpu")
        assert batch["x"].offsets.tolist() == [0, 2, 2, 3]
        assert batch["x"].values.offsets.tolist() == [0, 2, 2, 3]
        assert batch["x"].values.values.dtype == torch.int32 and batch["x"].values.values.tolist() == [1, 2, 3]

    def test_of_lists_of_lists_follow_ragged(self, tmp_path, suffix):
        path = write(tmp_path / f"a{suffix}", pa.table({"x": [[[1, 2], []], [], [[3]]]}))
        of = {
            ragged: next(
                iter(gdsdata.GDSDataset(path, 3, shuffle=False, device="cpu", fields=gdsdata.Fields(ragged=ragged)))
            )["x"]
            for ragged in ("padded", "list")
        }
        assert of["padded"].tolist() == [[[1, 2], [0, 0]], [[0, 0], [0, 0]], [[3, 0], [0, 0]]]
        assert as_python(of["list"]) == [[[1, 2], []], [], [[3]]]
        with pytest.raises(ValueError, match='one dimension that varies.*"flat", "padded" or "list"'):
            list(gdsdata.GDSDataset(path, 3, device="cpu", fields=gdsdata.Fields(ragged="nested")))

    @pytest.mark.parametrize(
        ("rows", "kind", "shape"),
        [
            ([[], []], pa.list_(pa.list_(pa.int16())), (2, 0, 0)),
            ([[], [[]]], pa.list_(pa.list_(pa.list_(pa.int16()))), (2, 1, 0, 0)),
            ([[], []], pa.list_(pa.list_(pa.list_(pa.int16(), 3))), (2, 0, 0, 3)),
            ([[], []], pa.list_(pa.binary()), (2, 0, 0)),
        ],
    )
    def test_a_batch_of_empty_lists_of_lists_is_padded(self, tmp_path, rows, kind, shape):
        path = write(tmp_path / "a.arrow", pa.table({"x": pa.array(rows, kind)}))
        (batch,) = gdsdata.GDSDataset(path, 2, device="cpu", fields=gdsdata.Fields(ragged="padded"))
        assert batch["x"].shape == shape

    def test_of_boxes_are_rows_of_four(self, tmp_path, suffix):
        boxes = pa.array([[[1, 2, 3, 4]], [], [[5, 6, 7, 8]] * 2], pa.list_(pa.list_(pa.float32(), 4)))
        (batch,) = gdsdata.GDSDataset(
            write(tmp_path / f"a{suffix}", pa.table({"x": boxes})), 3, shuffle=False, device="cpu"
        )
        assert batch["x"].values.shape == (3, 4) and batch["x"].offsets.tolist() == [0, 1, 1, 3]

    def test_of_chats_are_json(self, tmp_path, suffix):
        chats = [[{"role": "user", "content": "é"}, {"role": "assistant", "content": None}], [], None]
        path = write(tmp_path / f"a{suffix}", pa.table({"messages": chats}))
        assert read(path, decode={"messages": "json"})["messages"] == chats
        assert bytes(read(path)["messages"][1]) == b"[]"

    def test_of_a_map_are_pairs(self, tmp_path, suffix):
        maps = pa.array([[("a", 1), ("b", None)], None, []], pa.map_(pa.string(), pa.int8()))
        path = write(tmp_path / f"a{suffix}", pa.table({"x": pa.concat_arrays([maps, maps]).slice(1)}))
        assert read(path, decode={"x": "json"})["x"] == [None, [], [["a", 1], ["b", None]], None, []]

    def test_of_a_column_of_nulls_are_empty(self, tmp_path, suffix):
        assert read(write(tmp_path / f"a{suffix}", pa.table({"x": pa.nulls(3)})))["x"] == [[], [], []]

    def test_of_members_of_structs_are_decoded_too(self, tmp_path, suffix):
        column = pa.array([{"a": True, "b": [["x"]], "c": 1}, {"a": False, "b": None, "c": 2}])
        found = read(write(tmp_path / f"a{suffix}", pa.table({"s": column})), decode={"s.b": "json"})
        assert found == {"s.a": [True, False], "s.b": [[["x"]], None], "s.c": [1, 2]}

    def test_come_to_collate_as_lists(self, tmp_path, suffix):
        path = write(tmp_path / f"a{suffix}", pa.table({"x": [[[1], [2, 3]], []], "b": [True, False]}))
        data = gdsdata.GDSDataset(path, 2, shuffle=False, device="cpu", fields=gdsdata.Fields(collate=list))
        assert [as_python(sample["x"]) for batch in data for sample in batch] == [[[1], [2, 3]], []]

    def test_of_fixed_arrays_of_datasets_have_their_shape(self, tmp_path, suffix):
        values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
        name = b"datasets.features.features.Array2DExtensionType"

        def column(shape):
            said = {b"ARROW:extension:name": name, b"ARROW:extension:metadata": json.dumps([shape, "float32"]).encode()}
            return pa.field(f"of{shape[0]}", pa.list_(pa.list_(pa.float32())), metadata=said)

        stored = pa.array(values.tolist(), pa.list_(pa.list_(pa.float32())))
        table = pa.table([stored, stored], schema=pa.schema([column([2, 3]), column([None, 3])]))
        (batch,) = gdsdata.GDSDataset(write(tmp_path / f"a{suffix}", table), 4, shuffle=False, device="cpu")
        assert torch.equal(batch["of2"], torch.from_numpy(values))
        assert torch.equal(batch["ofNone"].values, torch.from_numpy(values).view(8, 3))
        table = pa.table([stored], schema=pa.schema([column([3, 3])]))
        with pytest.raises(ValueError, match="column 'of3' has arrays of another shape") as caught:
            read(write(tmp_path / f"b{suffix}", table))
        assert not isinstance(caught.value, CorruptData)

    def test_are_the_same_in_files_whose_structs_have_other_members(self, tmp_path, suffix):
        write(tmp_path / f"a{suffix}", pa.table({"x": [[{"a": 1}]]}))
        write(tmp_path / f"b{suffix}", pa.table({"x": [[{"a": 2, "b": "c"}]]}))
        assert read(tmp_path, decode={"x": "json"})["x"] == [[{"a": 1}], [{"a": 2, "b": "c"}]]


ALIKE = {
    "float64 and decimals": (pa.array([1.5, 2.5]), pa.array([decimal.Decimal("3.25")] * 3, pa.decimal128(7, 2))),
    "texts and views": (pa.array(["ab", "c"]), pa.array(["", "d", "e" * 20], pa.string_view())),
    "texts and JSON": (pa.array(["ab", "c"]), pa.array([["a"], ["b", "c"]])),
    "texts and nulls": (pa.array(["ab", "c"]), pa.nulls(2)),
}


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("kind", ALIKE)
def test_files_of_one_column_may_differ_in_whether_they_are_decoded(tmp_path, kind, ending):
    for order in (ALIKE[kind], ALIKE[kind][::-1]):
        alone = []
        for name, values in zip("ab", order, strict=True):
            path = write(tmp_path / kind / f"{name}{ending}", pa.table({"x": values}))
            alone += read(path)["x"]
        assert read(tmp_path / kind)["x"] == alone


MICROSECONDS, MILLISECONDS = pa.timestamp("us"), pa.timestamp("ms")


@pytest.mark.parametrize("ending", FORMATS)
def test_structs_of_two_members_of_one_name_are_no_json(tmp_path, ending):
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["k", "k"])
    path = write(tmp_path / f"a{ending}", pa.table({"x": pa.ListArray.from_arrays([0, 1], twice), "y": [1]}))
    with pytest.raises(ValueError, match=r"column 'x' .* has no form in a batch: .*columns=\('y',\)"):
        read(path)


@pytest.mark.parametrize("ending", FORMATS)
def test_a_filling_value_beyond_a_float_is_refused(tmp_path, ending):
    table = pa.table({"x": pa.array([None, 1], pa.float16()), "y": pa.array([None, 1], pa.float32())})
    path = write(tmp_path / f"a{ending}", table)
    for value in (65520, -1e300, 10**400):
        with pytest.raises(ValueError, match="'x' has nulls, and fill_null=.* is no value of float16"):
            read(path, FORMATS[ending](fill_null=value))
    with pytest.raises(ValueError, match="fill_null has 1e[+]39 for column 'y', which float32 has no value for"):
        read(path, FORMATS[ending](fill_null={"x": 0, "y": 1e39}))
    assert read(path, FORMATS[ending](fill_null={"x": 65504, "y": -math.inf})) == {"x": [65504, 1], "y": [-math.inf, 1]}


@pytest.mark.parametrize("format", FORMATS.values())
def test_a_filling_value_may_be_a_number_of_numpy(format):
    assert format(fill_null=np.int64(-100)) == format(fill_null=-100)
    assert format(fill_null={"x": np.float32(0.5)}) == format(fill_null={"x": 0.5})


OTHER_UNITS = {
    "timestamps": (pa.array([1], MICROSECONDS), pa.array([1], MILLISECONDS)),
    "timestamps and integers": (pa.array([1], MICROSECONDS), pa.array([1], pa.int64())),
    "days and integers": (pa.array([1], pa.date32()), pa.array([1], pa.int32())),
    "lists": tuple(pa.array([[1]], pa.list_(kind)) for kind in (MICROSECONDS, pa.duration("ns"))),
    "dictionaries": (pa.array([1], MICROSECONDS), pa.array([1], MILLISECONDS).dictionary_encode()),
    "JSON": tuple(pa.array([[{"a": 1}]], pa.list_(pa.struct([("a", kind)]))) for kind in (MICROSECONDS, MILLISECONDS)),
}


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("kind", OTHER_UNITS)
def test_files_whose_times_have_other_units_are_refused(tmp_path, kind, ending):
    for name, values in zip("ab", OTHER_UNITS[kind], strict=True):
        write(tmp_path / f"{name}{ending}", pa.table({"x": values}))
    with pytest.raises(ValueError, match=r"a\.\w+ counts column 'x.*' in .*, and .*b\.\w+ in .*cast"):
        read(tmp_path)


@pytest.mark.parametrize("ending", FORMATS)
def test_columns_in_the_names_of_folders_alone_are_reported(tmp_path, ending, recwarn):
    for label in "ab":
        write(tmp_path / f"label={label}" / f"0{ending}", pa.table({"x": [1]}))
    paths = f"{tmp_path}/*/*{ending}"
    with pytest.warns(RuntimeWarning, match=r"folders named by columns \('label'\), which are not read"):
        assert read(paths) == {"x": [1, 1]}
    with pytest.raises(ValueError, match="no column 'label': it has 'x'. 'label' stands in the names of folders"):
        read(paths, FORMATS[ending](columns=("x", "label")))
    recwarn.clear()
    read(paths, FORMATS[ending](columns=("x",)))
    read(f"{tmp_path}/label=a/*{ending}")
    write(tmp_path / "label=a" / f"0{ending}", pa.table({"x": [1], "label": ["a"]}))
    write(tmp_path / "label=b" / f"0{ending}", pa.table({"x": [1], "label": ["b"]}))
    read(paths)
    assert not recwarn.list


@pytest.mark.parametrize("ending", FORMATS)
def test_lists_of_times_of_one_unit_may_differ_in_their_type(tmp_path, ending):
    kinds = pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.duration("us"), pa.time64("us")
    for i, kind in enumerate(kinds):
        write(tmp_path / f"{i}{ending}", pa.table({"x": pa.array([[i]], pa.list_(kind)), "y": [True]}))
    assert read(tmp_path)["x"] == [[0], [1], [2], [3]]


def test_a_file_that_is_compressed_may_stand_beside_one_that_is_not(tmp_path):
    write(tmp_path / "a.arrow", pa.table({"x": [1, 2]}))
    write(tmp_path / "b.arrow", pa.table({"x": [3, 4]}), compression="zstd")
    assert read(tmp_path) == {"x": [1, 2, 3, 4]}


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_structs_without_members_may_stand_beside_other_columns(tmp_path, compression):
    empty = pa.struct([])
    table = pa.table({"s": pa.array([{}, None], empty), "l": pa.array([[{}, {}], []], pa.list_(empty)), "x": [1, 2]})
    path = write(tmp_path / "a.arrow", table, compression=compression)
    assert read(path, decode={"l": "json"}) == {"l": [[{}, {}], []], "x": [1, 2]}
    assert read(path, Arrow(columns=("x",))) == {"x": [1, 2]}


def test_dictionaries_may_stand_behind_plain_values(tmp_path):
    write(tmp_path / "a.arrow", pa.table({"x": pa.array([1, 2], pa.int32())}))
    write(tmp_path / "b.arrow", pa.table({"x": pa.array([70, 80], pa.int32()).dictionary_encode()}))
    assert read(tmp_path) == {"x": [1, 2, 70, 80]}


FILLED = {
    "bytes": [[[97, 98, 99], [1, 1, 1]], [], [[120, 121, 122]]],
    "one": [[[97], [1]], [], [[120]]],
    "pairs": [[[1, 1]], [[1, 1], [3, 4]], []],
    "flags": [[[True, True]], [[True, True]], []],
    "grids": [[[[1], [1]]], [], [[[1], [1]]]],
    "deep": [[[[97, 98]], [[1, 1]]], [], [[]]],
}


class TestNulls:
    def test_among_numbers_are_refused_with_the_option_that_fills_them(self, tmp_path, suffix):
        path = write(tmp_path / f"a{suffix}", pa.table({"x": [1, None]}))
        with pytest.raises(ValueError, match=r"column 'x' has nulls.*fill_null=\{'x': -100\}"):
            read(path)

    def test_are_filled_by_column(self, tmp_path, suffix):
        table = pa.table({"x": [1, None], "f": [None, 2.5], "box": pa.array([[1, None], None], pa.list_(pa.int8(), 2))})
        path = write(tmp_path / f"a{suffix}", table)
        found = read(path, FORMATS[suffix](fill_null={"x": -100, "f": math.nan, "box": 7}))
        assert found["x"] == [1, -100] and found["f"][1] == 2.5 and math.isnan(found["f"][0])
        assert found["box"] == [[1, 7], [7, 7]]
        with pytest.raises(ValueError, match="column 'f' has nulls"):
            read(path, FORMATS[suffix](fill_null={"x": -100, "box": 7}))

    def test_are_filled_in_lists_of_values_of_one_size(self, tmp_path, suffix):
        columns = {
            "bytes": pa.array([[b"abc", None], None, [b"xyz"]], pa.list_(pa.binary(3))),
            "one": pa.array([[b"a", None], None, [b"x"]], pa.list_(pa.binary(1))),
            "pairs": pa.array([[[1, None]], [None, [3, 4]], []], pa.list_(pa.list_(pa.int32(), 2))),
            "flags": pa.array([[[True, None]], [None], []], pa.list_(pa.list_(pa.bool_(), 2))),
            "grids": pa.array([[[[1], [None]]], None, [None]], pa.list_(pa.list_(pa.list_(pa.int16(), 1), 2))),
            "deep": pa.array([[[b"ab"], [None]], None, [[]]], pa.list_(pa.list_(pa.binary(2)))),
        }
        for sliced in (False, True):
            table = pa.table({name: values.slice(int(sliced)) for name, values in columns.items()})
            found = read(write(tmp_path / f"{sliced}{suffix}", table), FORMATS[suffix](fill_null=1))
            assert found == {name: values[int(sliced) :] for name, values in FILLED.items()}
            with pytest.raises(ValueError, match="has nulls"):
                read(tmp_path / f"{sliced}{suffix}")

    def test_are_not_filled_by_what_a_dtype_has_no_value_for(self, tmp_path, suffix):
        path = write(tmp_path / f"a{suffix}", pa.table({"x": pa.array([1, None], pa.uint8()), "y": [1, 2]}))
        kind = FORMATS[suffix]
        with pytest.raises(ValueError, match="fill_null has -100 for column 'x', which uint8 has no value for"):
            kind(fill_null={"x": -100}).index([str(path)])
        for value in (-100, 0.5):
            with pytest.raises(ValueError, match=f"column 'x' has nulls, and fill_null={value} is no value of uint8: "):
                read(path, kind(fill_null=value))
        assert read(path, kind(("y",), fill_null=-100)) == {"y": [1, 2]}
        with pytest.raises(ValueError, match="no column 'z', which fill_null names"):
            kind(fill_null={"z": 0}).index([str(path)])
        for wrong in ("0", {"x": "0"}, {0: 0}):
            with pytest.raises(ValueError, match="it is a number, or a mapping"):
                kind(fill_null=wrong)

    def test_options_can_be_compared_hashed_and_repeated(self, suffix):
        kind = FORMATS[suffix]
        assert kind(fill_null={"x": 1}) == kind(fill_null={"x": 1}) and hash(kind(fill_null={"x": 1}))
        assert eval(repr(kind(fill_null={"x": 1})), {kind.__name__: kind}) == kind(fill_null={"x": 1})


def test_a_chosen_struct_includes_its_members_and_no_columns_with_dots(tmp_path, suffix):
    table = pa.table({"a": [1, 2], "a.b": [3, 4], "s": [{"m": 5}, {"m": 6}], "s.x": [7, 8]})
    path = write(tmp_path / f"a{suffix}", table)
    assert read(path, FORMATS[suffix](("a", "s"))) == {"a": [1, 2], "s.m": [5, 6]}
    assert read(path, FORMATS[suffix](("s.x", "a.b"))) == {"s.x": [7, 8], "a.b": [3, 4]}
    path = write(tmp_path / f"b{suffix}", pa.table({"s": [{"m": 5}], "s.m": [6]}))
    with pytest.raises(ValueError, match="two columns 's.m'"):
        read(path, FORMATS[suffix](("s",)))


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("value", [1, True, "text"])
def test_a_struct_that_is_wanted_means_the_members_that_the_first_file_has(tmp_path, suffix, value):
    rows = [{"a": value, "b": [2]}, {"c": "d", "b": [4, 5], "a": value}, {"b": [6]}]
    paths = [write(tmp_path / f"{i}{suffix}", pa.table({"x": [row], "id": [i]})) for i, row in enumerate(rows)]
    wanted = FORMATS[suffix](columns=("x", "id"))
    stored = list(value.encode()) if isinstance(value, str) else value
    assert read(paths[:2], wanted) == {"x.a": [stored, stored], "x.b": [[2], [4, 5]], "id": [0, 1]}
    with pytest.raises(ValueError, match=f"2{suffix} has no column 'x.a': it has 'x.b', 'id'"):
        read(paths[::2], wanted)


def test_only_buffers_of_wanted_columns_are_read(tmp_path):
    table = pa.table({"big": [b"x" * 10**5] * 9, "flag": [True] * 9})
    path = write(tmp_path / "a.arrow", table)
    data = gdsdata.GDSDataset(path, 3, Arrow(("flag",)), device="cpu")
    assert [batch["flag"].tolist() for batch in data] == [[True] * 3] * 3
    assert sum(data.stats()["bytes"].values()) < 4000


def test_rows_that_lie_in_place_are_not_decoded(tmp_path):
    path = str(write(tmp_path / "a.arrow", pa.table({"x": [1], "flag": [True]})))
    assert isinstance(Arrow().index([path]), TableIndex)
    assert not isinstance(Arrow(("x",)).index([path]), TableIndex)


def test_a_kept_index_of_record_batches_reads_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("gdsdata.data.indexing.WORTH_S", 0)
    monkeypatch.setattr("gdsdata.formats.kept_index.SETTLED_NS", 0)
    path = write(tmp_path / "d" / "a.arrow", pa.table({"x": [[[1], [2, 3]], [], [[4]]], "y": [None, True, False]}))
    reading = gdsdata.Reading(index_cache=tmp_path / "kept")
    for _ in range(2):
        data = gdsdata.GDSDataset(path, 3, Arrow(fill_null={"y": 1}), shuffle=False, device="cpu", reading=reading)
        (batch,) = data
        assert as_python(batch["x"]) == [[[1], [2, 3]], [], [[4]]] and batch["y"].tolist() == [True, True, False]
    assert list((tmp_path / "kept").glob("*.gdsdata-index"))


@pytest.mark.parametrize("ending", FORMATS)
@pytest.mark.parametrize("around", ["list", "fixed-size list", "struct in a list"])
def test_tensors_in_lists_whose_axes_are_stored_in_another_order_are_refused(tmp_path, ending, around):
    kind = pa.fixed_shape_tensor(pa.int64(), [2, 3], permutation=[1, 0])
    tensors = pa.ExtensionArray.from_storage(kind, pa.FixedSizeListArray.from_arrays(pa.array(range(12)), 6))
    if around == "struct in a list":
        tensors = pa.StructArray.from_arrays([tensors], ["t"])
    lists = pa.ListArray.from_arrays([0, 1, 2], tensors)
    if around == "fixed-size list":
        lists = pa.FixedSizeListArray.from_arrays(tensors, 1)
    path = write(tmp_path / f"a{ending}", pa.table({"x": lists}))
    with pytest.raises(ValueError, match="column 'x' is of the type .*permutation.*which has no form in a batch"):
        FORMATS[ending]().index([str(path)])


# ------------------------------------------------------------------------------------------------- extension types


def only_batch(path, fill_null=None, batch_size=4):
    data = gdsdata.GDSDataset(path, batch_size, type_of(path)(fill_null=fill_null), shuffle=False, device="cpu")
    (batch,) = data
    return batch


def type_of(path):
    return FORMATS[path.suffix]


@pytest.mark.parametrize("ending", FORMATS)
def test_tensors_in_lists_have_their_shape(tmp_path, ending):
    values = np.arange(48, dtype=np.float32).reshape(8, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    table = pa.table(
        {
            "some": pa.ListArray.from_arrays([0, 3, 3, 7, 8], tensors),
            "pairs": pa.FixedSizeListArray.from_arrays(tensors, 2),
            "deep": pa.ListArray.from_arrays([0, 1, 1, 2, 3], pa.ListArray.from_arrays([0, 3, 7, 8], tensors)),
        }
    )
    batch = only_batch(write(tmp_path / f"a{ending}", table))
    expected = torch.from_numpy(values)
    assert [one.shape for one in batch["some"].as_list()] == [(3, 2, 3), (0, 2, 3), (4, 2, 3), (1, 2, 3)]
    assert torch.equal(torch.cat(list(batch["some"].as_list())), expected)
    assert torch.equal(batch["pairs"], expected.reshape(4, 2, 2, 3))
    assert as_python(batch["deep"]) == [[values[:3].tolist()], [], [values[3:7].tolist()], [values[7:].tolist()]]


@pytest.mark.parametrize("ending", FORMATS)
def test_booleans_of_a_byte_are_booleans(tmp_path, ending):
    bytes_ = pa.array([0, 1, -1, 2, 0, 127, -128, 0], pa.int8())  # all but 0 are true
    flags = pa.ExtensionArray.from_storage(pa.bool8(), bytes_)
    expected = [False, True, True, True, False, True, True, False]
    table = pa.table(
        {
            "flag": flags[:4],
            "pair": pa.FixedSizeListArray.from_arrays(flags, 2),
            "some": pa.ListArray.from_arrays([0, 3, 3, 7, 8], flags),
            "in": pa.StructArray.from_arrays([flags[4:]], ["flag"]),
        }
    )
    batch = only_batch(write(tmp_path / f"a{ending}", table))
    assert {batch[name].dtype for name in ("flag", "pair", "in.flag")} == {torch.bool}
    assert batch["flag"].tolist() == expected[:4] and batch["in.flag"].tolist() == expected[4:]
    assert batch["flag"].sum() == 3 and batch["flag"].view(torch.uint8).tolist() == [0, 1, 1, 1]
    assert batch["pair"].tolist() == np.reshape(expected, (4, 2)).tolist()
    assert as_python(batch["some"]) == [expected[:3], [], expected[3:7], expected[7:]]
    assert batch["some"].values.dtype == torch.bool


@pytest.mark.parametrize("ending", FORMATS)
def test_nulls_among_booleans_of_a_byte_need_a_value(tmp_path, ending):
    storage = pa.array([2, None, 0, None], pa.int8())
    path = write(tmp_path / f"a{ending}", pa.table({"flag": pa.ExtensionArray.from_storage(pa.bool8(), storage)}))
    assert only_batch(path, fill_null={"flag": 1})["flag"].tolist() == [True, True, False, True]
    with pytest.raises(ValueError, match="column 'flag' has nulls"):
        only_batch(path)
    with pytest.raises(ValueError, match="fill_null has 2 for column 'flag', which bool has no value for"):
        only_batch(path, fill_null={"flag": 2})


@pytest.mark.parametrize("ending", FORMATS)
def test_booleans_of_a_byte_are_booleans_in_json(tmp_path, ending):
    flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, None, 2, -1, 0], pa.int8()))
    plain = pa.array([False, True, None, True, True, False])
    structs = pa.StructArray.from_arrays([flags, plain], ["flag", "plain"])
    table = pa.table(
        {
            "structs": pa.ListArray.from_arrays([0, 2, 6], structs),
            "deep": pa.ListArray.from_arrays(
                [0, 1, 2],
                pa.StructArray.from_arrays([pa.ListArray.from_arrays([0, 4, 6], flags)], ["some"]),
            ),
            "map": pa.MapArray.from_arrays([0, 2, 3], pa.array(["a", "b", "c"]), flags[1:4]),
        }
    )
    found = read(write(tmp_path / f"a{ending}", table), decode=dict.fromkeys(table.column_names, "json"))
    expected = plain.to_pylist()
    both = [{"flag": one, "plain": one} for one in expected]
    assert found["structs"] == [both[:2], both[2:]]
    assert found["deep"] == [[{"some": expected[:4]}], [{"some": expected[4:]}]]
    assert found["map"] == [[["a", True], ["b", None]], [["c", True]]]
    assert all(type(one["flag"]) is type(one["plain"]) for row in found["structs"] for one in row)
