"""Parquet: rows are pyarrow's, each row group is decoded once, and damage is an error."""

import base64
import itertools
import json
import random
import threading

import numpy as np
import pytest
import torch
from helpers import grouped, peak_bytes, reset_peak
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tables import awkward, damaged, nested, pa, read_all, rows_in, rows_of, with_integers_of_128_bits

import gdsdata
from gdsdata.data.batches import row_groups
from gdsdata.data.order.epoch import part_of_step
from gdsdata.data.order.permutation import Order
from gdsdata.data.order.row_groups import InOrder, RowGroupPermutation, RowGroups, RowGroupShuffle
from gdsdata.data.ranks import Share
from gdsdata.errors import CorruptData, EngineClosed
from gdsdata.formats import Parquet, column_values, parquet, recognise
from gdsdata.formats.parsers.parquet_footer import row_groups_of
from gdsdata.formats.tables import TableIndex

pq = pytest.importorskip("pyarrow.parquet")


def write(path, table, group_rows=10, **options) -> str:
    """Write a file with row groups of so many rows, or of the numbers of a list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(str(path), table.schema, **options) as writer:
        sizes = [group_rows] * -(-len(table) // group_rows) if isinstance(group_rows, int) else group_rows
        first = 0
        for size in sizes:
            writer.write_table(table.slice(first, size), row_group_size=max(size, 1))
            first += size
    return str(path)


def numbered(rows: int) -> pa.Table:
    return pa.table({"id": pa.array(range(rows), pa.int64()), "text": pa.array(map(str, range(rows)), pa.string())})


def with_a_damaged_row_group(path):
    """Write rows 0 to 49 in groups of ten, and damage the group of rows 30 to 39."""
    write(path, numbered(50), write_page_checksum=True, compression="none", use_dictionary=False)
    column = pq.read_metadata(path).row_group(3).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    path.write_bytes(content)
    return path


def ids_of(source, **arguments) -> list[list[int]]:
    return [batch["id"].tolist() for batch in gdsdata.GDSDataset(source, device="cpu", **grouped(arguments))]


@pytest.fixture
def decoded_groups(monkeypatch) -> list[int]:
    """Record the row groups that were decoded, in order."""
    groups, decode, adding = [], TableIndex.decode, threading.Lock()

    def noted(self, group, stored):
        with adding:
            groups.append(group)
        return decode(self, group, stored)

    monkeypatch.setattr(TableIndex, "decode", noted)
    return groups


class TestRows:
    @pytest.mark.parametrize("group_rows", [1, 7, 1000, [3, 0, 30, 1, 7]])
    def test_are_those_that_pyarrow_reads(self, tmp_path, group_rows):
        table = awkward(41)
        path = write(tmp_path / "a.parquet", table, group_rows)
        assert rows_of(pq.read_table(path)) == rows_of(table)
        assert read_all(path) == rows_of(table)

    @pytest.mark.parametrize("codec", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
    @pytest.mark.parametrize("version", ["1.0", "2.0"])
    def test_are_read_with_every_codec_and_page_version(self, tmp_path, codec, version):
        table = awkward(41)
        options = {"compression": codec, "data_page_version": version, "write_page_checksum": True}
        assert read_all(write(tmp_path / "a.parquet", table, **options)) == rows_of(table)

    @pytest.mark.parametrize(
        "encoding", ["PLAIN", "BYTE_STREAM_SPLIT", "DELTA_BINARY_PACKED", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]
    )
    def test_are_read_with_every_encoding(self, tmp_path, encoding):
        table = awkward(41)
        suits = table.select(["text", "blob"] if "BYTE_ARRAY" in encoding else ["i64", "time"])
        path = write(tmp_path / "a.parquet", suits, use_dictionary=False, column_encoding=encoding)
        assert read_all(path) == rows_of(suits)

    def test_of_nested_values_that_pyarrow_decodes_only_in_parts_are_read(self, tmp_path, monkeypatch):
        table = awkward(41)
        for name in (one for one in nested(41).column_names if one not in ("flag", "deep", "text")):
            table = table.append_column(name, nested(41)[name])
        path, is_asked = write(tmp_path / "a.parquet", table, 41), []
        expected = read_all(path)

        def refused(*args, **kwargs):
            is_asked.append(True)
            raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")

        monkeypatch.setattr(pq.ParquetFile, "read_row_group", refused)
        assert read_all(path) == expected
        assert is_asked

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["texts", "messages"])
    def test_of_nested_texts_of_more_than_two_gib_in_a_row_group_are_read(self, tmp_path, kind):
        rows, path = 2304, tmp_path / "a.parquet"
        text = "x" * 2**20
        value = [text] if kind == "texts" else [{"role": "user", "content": text}]
        column = pa.chunked_array([pa.array([value] * 96)] * (rows // 96))
        pq.write_table(pa.table({"m": column, "id": range(rows)}), path, row_group_size=rows)
        with pytest.raises(NotImplementedError, match="Nested data"):
            pq.ParquetFile(path).read_row_group(0)
        reading = gdsdata.Reading(prefetch=1)
        ds = gdsdata.GDSDataset(path, 8, shuffle=False, device="cpu", reading=reading, split=(0, 8 / rows))
        (batch,) = ds
        assert batch["id"].tolist() == list(range(8))
        assert json.loads(batch["m"].as_list()[7].numpy().tobytes()) == value

    def test_of_several_files_follow_one_another_and_files_may_be_empty(self, tmp_path):
        tables = [awkward(rows, seed) for seed, rows in enumerate((3, 0, 25))]
        (tmp_path / "README.md").write_text("# A data set")
        for i, table in enumerate(tables):
            write(tmp_path / f"{i}.parquet", table)
        assert read_all(tmp_path) == rows_of(pa.concat_tables(tables))

    def test_of_dictionaries_booleans_and_fixed_shape_tensors_are_decoded(self, tmp_path):
        values = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
        table = pa.table(
            {
                "word": pa.array(["a", None, "bb", "a"]).dictionary_encode(),
                "flag": [True, False, True, True],
                "flags": [[True], [], [False, True], None],
                "t": pa.FixedShapeTensorArray.from_numpy_ndarray(values),
            }
        )
        write(tmp_path / "a.parquet", table, 3)
        (batch,) = gdsdata.GDSDataset(
            tmp_path, batch_size=4, shuffle=False, device="cpu", fields=gdsdata.Fields(decode={"word": "txt"})
        )
        assert batch["word"] == ["a", "", "bb", "a"]
        assert batch["flag"].dtype == torch.bool and batch["flag"].tolist() == [True, False, True, True]
        assert [one.tolist() for one in batch["flags"].as_list()] == [[True], [], [False, True], []]
        assert torch.equal(batch["t"], torch.from_numpy(values))

    @pytest.mark.parametrize("batch_size", [1, 3])
    def test_of_fixed_size_lists_of_booleans_keep_their_shape(self, tmp_path, batch_size):
        values = np.random.default_rng(3).integers(0, 2, (7, 2, 3)).astype(bool)
        kind = pa.list_(pa.list_(pa.bool_(), 3), 2)
        path = write(tmp_path / "a.parquet", pa.table({"mask": pa.array(values.tolist(), kind)}), 4)
        batches = list(gdsdata.GDSDataset(path, batch_size=batch_size, shuffle=False, device="cpu"))
        found = torch.cat([batch["mask"] for batch in batches])
        assert found.dtype == torch.bool and torch.equal(found, torch.from_numpy(values))

    def test_have_only_the_columns_that_are_wanted_and_read_no_others(self, tmp_path):
        table = awkward(30).append_column("cost", pa.array([1] * 30, pa.decimal128(5, 2)))
        path = write(tmp_path / "a.parquet", table)
        dataset = gdsdata.GDSDataset(path, 5, format=Parquet(columns=["image", "u8"]), shuffle=False, device="cpu")
        expected = rows_of(table)
        assert rows_in(dataset) == {name: expected[name] for name in ("image.bytes", "image.path", "image.in.w", "u8")}
        read_bytes = sum(dataset.stats()["bytes"].values())
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        stored = [group.column(i) for group in groups for i in range(group.num_columns)]
        wanted = [one for one in stored if one.path_in_schema.split(".")[0] in ("image", "u8")]
        assert read_bytes == sum(one.total_compressed_size for one in wanted)

    def test_of_many_columns_cost_as_many_steps_a_column_as_of_few(self, tmp_path, monkeypatch):
        asked, ask = [], column_values.arrow_module
        monkeypatch.setattr(column_values, "arrow_module", lambda *name: asked.append(name) or ask(*name))
        steps = []
        for columns in (10, 200):
            path = write(tmp_path / f"{columns}.parquet", pa.table({f"c{i}": [i] for i in range(columns)}))
            asked.clear()
            assert read_all(path) == {f"c{i}": [i] for i in range(columns)}
            steps.append(len(asked) / columns)
        assert steps[1] <= steps[0]

    def test_can_be_kept_and_written_to(self, tmp_path):
        path = write(tmp_path / "a.parquet", numbered(40))
        batches = list(gdsdata.GDSDataset(path, 10, shuffle=False, device="cpu"))
        for batch in batches:
            batch["id"].add_(1)
            batch["text"].values.zero_()
        assert torch.cat([batch["id"] for batch in batches]).tolist() == list(range(1, 41))

    @pytest.mark.parametrize("ragged, kind", [("list", list), ("padded", torch.Tensor), ("nested", torch.Tensor)])
    def test_come_as_ragged_says(self, tmp_path, ragged, kind):
        path = write(tmp_path / "a.parquet", pa.table({"l": [[1, 2], [3]]}))
        (batch,) = gdsdata.GDSDataset(path, 2, shuffle=False, device="cpu", fields=gdsdata.Fields(ragged=ragged))
        assert isinstance(batch["l"], kind) and [one.tolist()[:1] for one in batch["l"]] == [[1], [3]]

    def test_come_one_by_one_to_collate(self, tmp_path):
        write(tmp_path / "a.parquet", numbered(25))
        data = gdsdata.GDSDataset(
            tmp_path,
            10,
            shuffle=False,
            device="cpu",
            fields=gdsdata.Fields(decode={"text": "txt"}, collate=lambda samples: samples),
        )
        found = [(int(sample["id"]), sample["text"]) for batch in data for sample in batch]
        assert found == [(i, str(i)) for i in range(25)]

    def test_that_cannot_be_decoded_are_named_by_file_row_group_and_row(self, tmp_path):
        path = write(tmp_path / "a.parquet", pa.table({"j": ["1"] * 13 + ["{"]}))
        with pytest.raises(CorruptData, match=f"row 3 of row group 1 of {path}: column 'j' cannot be decoded"):
            list(gdsdata.GDSDataset(path, 14, shuffle=False, device="cpu", fields=gdsdata.Fields(decode={"j": "json"})))

    @pytest.mark.parametrize("decoder", ["json", "cls", "npy"])
    def test_that_are_null_say_so_if_they_cannot_be_decoded(self, tmp_path, decoder):
        path = write(tmp_path / "a.parquet", pa.table({"j": pa.array([None], pa.string())}))
        with pytest.raises(CorruptData, match="row 0 .* column 'j' is null or empty, which cannot be decoded: .*skip"):
            list(gdsdata.GDSDataset(path, 1, device="cpu", fields=gdsdata.Fields(decode={"j": decoder})))

    @pytest.mark.parametrize("format", ["parquet", "arrow"])
    def test_of_images_that_lie_in_other_files_say_so(self, tmp_path, format):
        """As to_parquet of `datasets` writes images that were given by their paths."""
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        table = pa.table({"image": pa.array([{"bytes": None, "path": "cats/0.png"}] * 2, kind)})
        path = tmp_path / f"a.{format}"
        if format == "parquet":
            write(path, table)
        else:
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        fields = gdsdata.Fields(decode={"image.bytes": "npy"})
        with pytest.raises(CorruptData, match="'image.bytes'.*'image.path' names a file, which is not read: .*bytes"):
            list(gdsdata.GDSDataset(path, 2, device="cpu", fields=fields))


class TestRefusals:
    @pytest.mark.parametrize(
        "column, said",
        [
            (
                pa.array([[], []], pa.list_(pa.int8(), 0)),
                "column 'x' is of the type fixed_size_list.*columns=\\('y',\\)",
            ),
        ],
    )
    def test_name_the_column_and_how_to_leave_it_out(self, tmp_path, column, said):
        path = write(tmp_path / "a.parquet", pa.table({"x": column, "y": [1, 2]}))
        with pytest.raises(ValueError, match=said):
            Parquet().index([path])
        assert read_all(path, format=Parquet(("y",))) == {"y": [1, 2]}

    @pytest.mark.parametrize(
        "column",
        [pa.array([1, None]), pa.array([[1, None], []]), pa.array([[1, None], [1, 2]], pa.list_(pa.int8(), 2))],
        ids=["number", "list", "fixed"],
    )
    def test_of_nulls_among_numbers_come_with_the_batch(self, tmp_path, column):
        path = write(tmp_path / "a.parquet", pa.table({"x": column}))
        with pytest.raises(ValueError, match="column 'x' has nulls.*fill_null") as caught:
            read_all(path)
        assert path in str(caught.value) and not isinstance(caught.value, CorruptData)

    @pytest.mark.parametrize("column", [pa.array([1.5, None]), pa.array([[1.5, None]], pa.list_(pa.float32()))])
    def test_of_nulls_among_floats_name_nan(self, tmp_path, column):
        """As pandas writes NaN."""
        path = write(tmp_path / "a.parquet", pa.table({"x": column}))
        with pytest.raises(ValueError, match=r"nulls.* fill_null=float\('nan'\) or fill_null={'x': float\('nan'\)}"):
            read_all(path)
        assert "nan" in str(read_all(path, format=Parquet(fill_null={"x": float("nan")})))

    @pytest.mark.parametrize("shuffle", ["uniform", gdsdata.Lanes(1, 1, 1), "other"])
    def test_of_shuffles_that_would_decode_a_row_group_for_each_row(self, tmp_path, shuffle):
        path = write(tmp_path / "a.parquet", numbered(9))
        with pytest.raises(ValueError, match="is not for tables.*RowGroups"):
            gdsdata.GDSDataset(path, 3, shuffle=shuffle, device="cpu")

    @pytest.mark.parametrize("year", [1, 1677, 1678, 2261, 2263, 9999])
    @pytest.mark.parametrize(
        ("kind", "around"),
        [
            (pa.timestamp("us"), lambda time: time),
            (pa.list_(pa.timestamp("us")), lambda time: [time]),
            (pa.struct([("in", pa.list_(pa.struct([("t", pa.timestamp("us"))])))]), lambda time: {"in": [{"t": time}]}),
            (pa.map_(pa.string(), pa.timestamp("us")), lambda time: [("k", time)]),
        ],
    )
    def test_of_int96_times_that_nanoseconds_cannot_count(self, tmp_path, year, kind, around):
        time = np.datetime64(f"{year:04}-01-01T00:00:00.5", "us").item()
        table = pa.table({"id": [1, 2], "old": pa.array([around(time), None], kind)})
        path = write(tmp_path / "a.parquet", table, use_deprecated_int96_timestamps=True)
        format = Parquet(fill_null=0)
        if 1677 < year < 2262:
            read_all(path, format=format)
        else:
            with pytest.raises(ValueError, match="row group 0 .*'old' has times of .* INT96 .* leave it out"):
                read_all(path, format=format)
        assert read_all(path, format=Parquet(columns=["id"])) == {"id": [1, 2]}

    def test_of_unlike_files(self, tmp_path):
        write(tmp_path / "a.parquet", numbered(9))
        write(tmp_path / "b.parquet", pa.table({"id": pa.array([1], pa.int32())}))
        with pytest.raises(ValueError, match="separate datasets"):
            gdsdata.GDSDataset(tmp_path, 3, device="cpu")

    @pytest.mark.parametrize("order", ["ab", "ba"])
    @pytest.mark.parametrize(
        ("values", "none"),
        [
            (pa.array([1, 2]), pa.nulls(2)),
            (pa.array([[1], []]), pa.nulls(2)),
            (pa.array([[1], []]), pa.array([[], None], pa.list_(pa.null()))),
        ],
    )
    def test_of_columns_without_values_beside_numbers_say_so(self, tmp_path, order, values, none):
        paths = [str(tmp_path / f"{letter}.parquet") for letter in order]
        for path, column in zip(paths, (values, none), strict=True):
            pq.write_table(pa.table({"id": [1, 2], "x": column}), path)
        with pytest.raises(ValueError, match=f"{paths[1]}: column 'x' has only nulls .* int64 .* {paths[0]}: "):
            gdsdata.GDSDataset(tmp_path, 2, device="cpu")

    def test_never_are_of_columns_without_values_beside_texts_or_objects(self, tmp_path):
        for i, (text, chat) in enumerate([("a", [{"n": 1}]), (None, None), (None, [])]):
            pq.write_table(pa.table({"text": [text], "chat": [chat]}), tmp_path / f"{i}.parquet")
        assert read_all(tmp_path)["text"] == [[97], [], []]

    def test_of_encrypted_files(self, tmp_path):
        path = tmp_path / "a.parquet"
        write(path, numbered(9))
        content = path.read_bytes()
        path.write_bytes(content[:-4] + b"PARE")
        with pytest.raises(ValueError, match="is encrypted"):
            Parquet().index([str(path)])

    @pytest.mark.parametrize("on_error", ["raise", "skip"])
    def test_of_a_schema_that_pyarrow_does_not_know_do_not_call_it_damage(self, tmp_path, on_error):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"wide": pa.array([1, 2], pa.int64())}), path)
        said = pq.read_metadata(path).metadata[b"ARROW:schema"]
        wide = base64.b64encode(with_integers_of_128_bits(base64.b64decode(said)))
        path.write_bytes(path.read_bytes().replace(said, wide))
        with pytest.raises(ValueError, match=f"{path}: .*pyarrow.*more than 64 bits.*cast") as caught:
            gdsdata.GDSDataset(path, 1, device="cpu", on_error=on_error)
        assert not isinstance(caught.value, CorruptData)

    def test_of_row_groups_too_large_for_memory(self, tmp_path, monkeypatch):
        monkeypatch.setattr("gdsdata.formats.parquet._LARGEST_GROUP_BYTES", 100)
        with pytest.raises(ValueError, match="row group 0 of 10 rows would take .* write smaller row groups"):
            Parquet().index([write(tmp_path / "a.parquet", numbered(20))])


@st.composite
def shuffles(draw):
    """Draw arguments of `RowGroupPermutation` without the epoch."""
    lanes, a_lane = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=30))
    return {
        "shape": RowGroups(lanes, draw(st.integers(1, 90))),
        "group_first_row": np.cumsum([0, *sizes]),
        "step_samples": lanes * a_lane,
        "seed": draw(st.integers(-(2**70), 2**70)),
    }


def epoch_of(permutation, group_first_row) -> np.ndarray:
    return permutation(np.arange(group_first_row[-1]))


class TestRowGroupPermutation:
    @given(shuffles(), st.integers(0, 2**40))
    @settings(max_examples=150, deadline=None)
    def test_reaches_every_row_once(self, arguments, epoch):
        ids = epoch_of(RowGroupPermutation(**arguments, epoch=epoch), arguments["group_first_row"])
        assert ids.dtype == np.int64 and (np.sort(ids) == np.arange(len(ids))).all()

    @given(shuffles(), st.data())
    @settings(max_examples=50, deadline=None)
    def test_evaluates_each_position_alone(self, arguments, data):
        rows = int(arguments["group_first_row"][-1])
        positions = np.array(data.draw(st.lists(st.integers(0, rows - 1), max_size=20)), np.int64)
        permutation, before = RowGroupPermutation(**arguments, epoch=3), positions.copy()
        assert (permutation(positions) == epoch_of(permutation, arguments["group_first_row"])[positions]).all()
        assert (positions == before).all()

    @given(shuffles(), st.sampled_from([1, 2, 3, 4, 8]), st.integers(1, 5), st.data())
    @settings(max_examples=150, deadline=None)
    def test_says_before_which_row_groups_a_processs_steps_need(self, arguments, world_size, peers, data):
        first_row, step_samples = arguments["group_first_row"], arguments["step_samples"] * world_size
        arguments["step_samples"] = step_samples
        permutation = RowGroupPermutation(**arguments, epoch=1)
        ids, rank = epoch_of(permutation, first_row), data.draw(st.integers(0, world_size - 1))
        part = part_of_step(step_samples, Share(rank, world_size), data.draw(st.integers(0, peers - 1)), peers)
        steps = len(ids) // step_samples
        begin = data.draw(st.integers(0, steps))
        end = data.draw(st.integers(begin, begin + 5))
        used = [ids[step * step_samples :][part.start : part.stop] for step in range(begin, min(end, steps - 1) + 1)]
        needed = set((np.searchsorted(first_row, np.concatenate([[], *used]), side="right") - 1).tolist())
        assert needed <= set(permutation.of_part(part).groups(begin, end).tolist())

    @given(shuffles(), st.integers(1, 4), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
    @example({"group_first_row": np.arange(3), "step_samples": 2}, 2, 1, 0, 0)  # a batch of one rank has all rows
    @example({"group_first_row": np.arange(10), "step_samples": 1}, 1, 2, 0, 0)  # the last peer has no part
    @settings(max_examples=100, deadline=None)
    def test_of_files_in_their_order_says_exactly_which_they_are(self, arguments, world_size, peers, begin, more):
        first_row = arguments["group_first_row"]
        step_samples = arguments["step_samples"] * world_size
        parts = [
            part_of_step(step_samples, Share(rank, world_size), place, peers)
            for rank in range(world_size)
            for place in range(peers)
        ]
        assert [position for part in parts for position in part] == list(range(step_samples))
        for part in parts:
            starts = [step * step_samples for step in range(begin, begin + more + 1)]
            used = [start + i for start in starts for i in part if start + i < first_row[-1]]
            needed = np.unique(np.searchsorted(first_row, used, side="right") - 1).tolist()
            assert InOrder(first_row, step_samples, part).groups(begin, begin + more).tolist() == needed

    def test_mixes_the_rows_of_a_window(self):
        first_row = np.arange(0, 8 * 16 * 100 + 1, 100)
        permutation = RowGroupPermutation(RowGroups(8, 400), first_row, 64, 0, 0)
        batches = epoch_of(permutation, first_row).reshape(-1, 64) // 100
        assert np.mean([len(np.unique(batch)) for batch in batches]) > 24  # of about 8 * 5
        assert (np.diff(np.sort(batches[50])) == 0).mean() < 0.7

    def test_every_row_is_as_likely_at_every_position(self):
        first_row, epochs = np.array([0, 3, 4, 11, 20, 29]), 600
        shape = RowGroups(2, 6)
        permutations = (RowGroupPermutation(shape, first_row, 4, 11, epoch) for epoch in range(epochs))
        ids = np.stack([epoch_of(permutation, first_row) for permutation in permutations])
        table = np.stack([np.bincount(column, minlength=29) for column in ids.T])
        chi_square, degrees = ((table - epochs / 29) ** 2).sum() / (epochs / 29), 29 * 28
        assert abs(chi_square - degrees) / (2 * degrees) ** 0.5 < 6

    @pytest.mark.parametrize("world_size", [1, 2, 4, 8])
    def test_gives_ranks_row_groups_of_their_own_but_for_the_lanes_edges(self, world_size):
        first_row = np.arange(0, 200 * 50 + 1, 50)
        shuffle = RowGroupShuffle(RowGroups(8, 150), first_row)
        owners = np.zeros(200, int)
        for rank in range(world_size):
            order = Order(10_000, 64 // world_size, shuffle, 0, False, rank, world_size)
            ids, _ = order.plan(3, 0, len(order))
            owners[np.unique(ids // 50)] += 1
        assert owners.min() >= 1 and (owners > 1).sum() <= world_size + 1 and owners.max() <= 2

    def test_depends_on_seed_and_epoch(self):
        first_row = np.arange(0, 1001, 10)
        shuffle = RowGroupShuffle(RowGroups(4, 50), first_row)
        epochs = [shuffle.permutation(1000, 8, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
        assert len({tuple(epoch_of(epoch, first_row)) for epoch in epochs}) == 4

    @pytest.mark.parametrize("step_samples, lanes", [(1024, 8), (6, 6), (7 * 11, 7), (13, 1)])
    def test_fits_lanes_to_the_batch(self, step_samples, lanes):
        assert RowGroups.fitting(10**6, 100, 100, step_samples).lanes == lanes

    def test_fits_windows_and_then_lanes_to_memory(self):
        def shape(row_bytes):
            return RowGroups.fitting(10**8, 1000, row_bytes, 64)

        assert shape(10) == RowGroups(8, 16 * 10**5)
        assert shape(400) == RowGroups(8, 4 * 10**5)
        assert shape(1100) == RowGroups(8, 10**5)
        assert shape(2500) == RowGroups(2, 10**5)
        assert shape(10**6) == RowGroups(1, 10**5)

    @pytest.mark.parametrize("lanes, window_rows", [(0, 1), (1, 0), (1, 2**31 + 1)])
    def test_refuses_shapes_out_of_range(self, lanes, window_rows):
        with pytest.raises(ValueError, match="must be in"):
            RowGroups(lanes, window_rows)


class TestEpochs:
    @pytest.mark.parametrize("shuffle", [True, "auto", "lanes", RowGroups(2, 30), False])
    def test_have_every_row_once_and_values_stay_together(self, tmp_path, shuffle):
        path = write(tmp_path / "a.parquet", numbered(500), [7, 100, 1, 92, 200, 100])
        dataset = gdsdata.GDSDataset(
            path, 16, shuffle=shuffle, device="cpu", fields=gdsdata.Fields(decode={"text": "txt"})
        )
        orders = []
        for _ in range(2):
            pairs = [pair for batch in dataset for pair in zip(batch["id"].tolist(), batch["text"], strict=True)]
            assert sorted(pairs) == [(i, str(i)) for i in range(500)]
            orders.append(pairs)
        assert (orders[0] == orders[1]) == (shuffle is False)
        assert dataset.stats()["shuffle"].startswith("none" if shuffle is False else "RowGroups(lanes=")

    @pytest.mark.parametrize("world_size", [1, 2, 4, 8])
    def test_continue_where_they_stopped_on_any_number_of_ranks(self, tmp_path, world_size):
        path = write(tmp_path / "a.parquet", numbered(1000), [100, 300, 50, 550])
        whole = ids_of(path, batch_size=64, seed=5)
        for stop in random.Random(world_size).sample(range(1, 15), 2):
            one = gdsdata.GDSDataset(path, 64, seed=5, device="cpu")
            batches = iter(one)
            for _ in range(stop):
                next(batches)
            state = one.state_dict()
            shares = []
            for rank in range(world_size):
                dataset = gdsdata.GDSDataset(
                    path,
                    64 // world_size,
                    seed=5,
                    device="cpu",
                    sharding=gdsdata.Sharding(rank=rank, world_size=world_size),
                )
                dataset.load_state_dict(state)
                shares.append([batch["id"].tolist() for batch in dataset])
            steps = [sum(parts, []) for parts in zip(*shares, strict=True)]
            assert steps[: 15 - stop] == whole[stop:15]

    @pytest.mark.parametrize("shuffle", [True, False])
    @pytest.mark.parametrize("batch_size", [10**9, 2**61])
    def test_of_a_batch_far_larger_than_all_rows_have_every_row_once(self, tmp_path, shuffle, batch_size):
        path = write(tmp_path / "a.parquet", numbered(50))
        said = dict(batch_size=batch_size, shuffle=shuffle, world_size=2)
        seen = [ids_of(path, **said, rank=rank) for rank in range(2)]
        assert [[len(batch) for batch in batches] for batches in seen] == [[25], [25]]
        assert sorted(seen[0][0] + seen[1][0]) == list(range(50))
        data = gdsdata.GDSDataset(path, device="cpu", **grouped({**said, "rank": 0}))
        assert data.stats()["ring_bytes"] < 2**20

    def test_of_other_row_groups_do_not_continue(self, tmp_path):
        states = []
        for i, group_rows in enumerate((10, 20)):
            path = write(tmp_path / f"{i}.parquet", numbered(100), group_rows)
            dataset = gdsdata.GDSDataset(path, 8, shuffle=RowGroups(8, 10), device="cpu")
            states.append(dataset.state_dict())
        with pytest.raises(ValueError, match="another data set or order"):
            dataset.load_state_dict(states[0])

    @pytest.mark.parametrize("shuffle", [False, RowGroups(4, 200)])
    @pytest.mark.parametrize("batch_size", [16, 128])
    def test_decode_a_row_group_once_but_for_lanes_edges(
        self, tmp_path, monkeypatch, decoded_groups, shuffle, batch_size
    ):
        monkeypatch.setattr(row_groups, "_KEPT_BYTES", 0)
        path = write(tmp_path / "a.parquet", numbered(8000), 100)
        dataset = gdsdata.GDSDataset(path, batch_size, shuffle=shuffle, device="cpu")
        most = 0
        for _ in itertools.islice(dataset, len(dataset) - 1):  # with the last batch, reading is closed
            most = max(most, len(dataset._iteration.running.row_groups.held))
        assert set(decoded_groups) == set(range(80))
        assert len(decoded_groups) <= (80 if shuffle is False else 80 + 4 + 1)
        assert most <= 5 * 4 + 4

    def test_that_fit_into_memory_decode_a_row_group_once(self, tmp_path, decoded_groups):
        path = write(tmp_path / "a.parquet", numbered(1000), 100)
        ids_of(path, batch_size=64)
        assert sorted(decoded_groups) == list(range(10))

    @pytest.mark.parametrize("shuffle", [False, RowGroups(3, 20)])
    @pytest.mark.parametrize("uneven", ["pad", "repeat"])
    def test_end_with_rows_that_no_lane_has_or_that_come_again(self, tmp_path, monkeypatch, shuffle, uneven):
        monkeypatch.setattr(row_groups, "_KEPT_BYTES", 0)
        path = write(tmp_path / "a.parquet", numbered(101), 4)
        arguments = {"batch_size": 4, "shuffle": shuffle, "uneven": uneven, "world_size": 3}
        ids = [i for rank in range(3) for batch in ids_of(path, rank=rank, **arguments) for i in batch]
        assert set(ids) == set(range(101)) and len(ids) == (102 if uneven == "pad" else 108)

    @pytest.mark.parametrize("shuffle", [False, RowGroups(4, 300)])
    def test_hold_no_more_memory_than_they_say(self, tmp_path, monkeypatch, shuffle):
        monkeypatch.setattr(row_groups, "_KEPT_BYTES", 0)
        path = write(tmp_path / "a.parquet", pa.table({"id": range(20_000)}), 100)
        dataset = gdsdata.GDSDataset(path, 32, shuffle=shuffle, device="cpu")
        but_the_last = itertools.islice(dataset, len(dataset) - 1)  # with the last batch, reading is closed
        most_bytes = max(len(dataset._iteration.running.row_groups.held) * 800 for _ in but_the_last)
        decoding_bytes = 4 * row_groups._decoding_bytes(dataset._samples.index)  # by at most four threads
        assert 2 * most_bytes + decoding_bytes > dataset.stats()["ring_bytes"] > 0.8 * most_bytes

    def test_break_off_and_close(self, tmp_path):
        path = write(tmp_path / "a.parquet", numbered(10_000), 100)
        dataset = gdsdata.GDSDataset(path, 64, device="cpu")
        batches = iter(dataset)
        next(batches)
        running = dataset._iteration.running
        batches.close()
        with pytest.raises(EngineClosed):
            running.next()
        assert sum(dataset.stats()["bytes"].values()) > 0

    def test_are_the_same_in_a_dataloader(self, tmp_path):
        path = write(tmp_path / "a.parquet", numbered(300), 30)
        dataset = gdsdata.GDSDataset(path, 16, device="cpu")
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
        assert [batch["id"].tolist() for batch in loader] == ids_of(path, batch_size=16)

    def test_of_no_rows_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match=r"no samples in .*a.parquet \(of 1 files\)"):
            gdsdata.GDSDataset(write(tmp_path / "a.parquet", numbered(0)), 2, device="cpu")


class TestDamage:
    def test_a_file_cut_short_anywhere_is_corrupt(self, tmp_path):
        path = tmp_path / "a.parquet"
        write(path, awkward(9))
        sound = path.read_bytes()
        for length in {0, 3, 4, 8, 11, 12, len(sound) - 1, *range(0, len(sound), 397)}:
            path.write_bytes(sound[:length])
            with pytest.raises(CorruptData) as caught:
                Parquet().index([str(path)])
            assert caught.value.path == str(path)

    def test_a_footers_length_that_lies_is_not_read(self, tmp_path):
        path = tmp_path / "a.parquet"
        with open(path, "wb") as stream:
            stream.write(b"PAR1")
            stream.truncate(2**33)
            stream.seek(0, 2)
            stream.write((2**31).to_bytes(4, "little") + b"PAR1")
        with pytest.raises(CorruptData, match="its footer would have"):
            Parquet().index([str(path)])

    def test_a_row_group_that_is_damaged_is_named(self, tmp_path):
        path = with_a_damaged_row_group(tmp_path / "a.parquet")
        dataset = gdsdata.GDSDataset(path, 10, shuffle=False, device="cpu")
        batches = iter(dataset)
        assert [next(batches)["id"].tolist()[0] for _ in range(3)] == [0, 10, 20]
        with pytest.raises(CorruptData, match=f"row group 3 of {path}, at bytes .* CRC") as caught:
            next(batches)
        assert caught.value.path == str(path) and caught.value.offset > 0

    @pytest.mark.filterwarnings("ignore:gdsdata")
    def test_a_row_group_that_is_damaged_is_left_out_where_that_is_asked_for(self, tmp_path):
        path = with_a_damaged_row_group(tmp_path / "a.parquet")
        data = gdsdata.GDSDataset(path, 15, shuffle=False, device="cpu", on_error="skip")
        ids = [batch["id"].tolist() for batch in data]
        assert sum(ids, []) == [*range(30), *range(40, 50)] and len(ids) == 4
        skipped = data.stats()["skipped"]
        assert skipped["samples"] == 10 and "row group 3" in skipped["named"][0][2]

    @pytest.mark.filterwarnings("ignore:gdsdata")
    def test_a_file_that_is_no_longer_whole_is_left_out_where_that_is_asked_for(self, tmp_path):
        write(tmp_path / "a.parquet", numbered(20))
        (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-20])
        data = gdsdata.GDSDataset(tmp_path, 10, shuffle=False, device="cpu", on_error="skip")
        assert sum((batch["id"].tolist() for batch in data), []) == list(range(20))
        assert data.stats()["skipped"]["files"] == 1

    def test_a_file_that_is_replaced_is_corrupt(self, tmp_path):
        path = tmp_path / "a.parquet"
        write(path, numbered(50))
        dataset = gdsdata.GDSDataset(path, 10, device="cpu")
        write(path, numbered(60))
        with pytest.raises(CorruptData, match=str(path)):
            list(dataset)
        assert sum(len(batch["id"]) for batch in dataset) == 60  # the next epoch looks at the file again

    @pytest.mark.parametrize("part", ["footer", "data"])
    def test_damage_gives_right_rows_or_an_error_that_names_the_file(self, tmp_path, part):
        """Rows with sound page checksums are right. Other damage may not change their number."""
        path = tmp_path / "a.parquet"
        write(path, awkward(40), write_page_checksum=True)
        sound, rng = path.read_bytes(), random.Random(part)
        expected = rows_of(pq.read_table(path))
        footer_at = len(sound) - 8 - int.from_bytes(sound[-8:-4], "little")
        reset_peak()
        before = peak_bytes()
        right = wrong = 0
        for _ in range(150):
            if part == "footer":
                path.write_bytes(sound[:footer_at] + damaged(sound[footer_at:], rng))
            else:
                path.write_bytes(damaged(sound[:footer_at], rng) + sound[footer_at:])
            try:
                rows = read_all(path, batch_size=40)
            except ValueError as error:  # includes CorruptData
                assert str(path) in str(error)
                wrong += 1
            else:
                right += part == "footer" or rows == expected
        assert wrong > 20 and (part == "footer" or right + wrong == 150)
        assert peak_bytes() - before < 256 * 2**20


def footer_of(content: bytes) -> bytes:
    return content[-8 - int.from_bytes(content[-8:-4], "little") : -8]


def with_footer(content: bytes, footer: bytes) -> bytes:
    return content[: -8 - len(footer_of(content))] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def said_by_pyarrow(path) -> list:
    """Return the expected result of `row_groups_of` for the file's footer."""
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    return [(group.num_rows, [_column(group.column(i)) for i in range(group.num_columns)]) for group in groups]


def _column(said) -> tuple:
    sizes = (said.num_values, said.total_compressed_size, said.total_uncompressed_size)
    return (*sizes, said.data_page_offset, said.dictionary_page_offset, said.file_path, False)


# Thrift's compact protocol: kinds of values, and structs of fields (number, kind, bytes).
I64, BINARY, LIST, STRUCT = 6, 8, 9, 12


def thrift(*fields: tuple[int, int, bytes]) -> bytes:
    return b"".join(bytes([kind, 2 * number]) + value for number, kind, value in fields) + b"\0"


def footer_with(*column: tuple[int, int, bytes], metadata: bytes = b"") -> bytes:
    """Make a row group of one row and one column, with more fields in its ``ColumnChunk``.

    ``metadata`` is added to its ``ColumnMetaData``.
    """
    numbers = [(number, I64, bytes([2 * number])) for number in (5, 6, 7, 9)]
    chunk = thrift((3, STRUCT, metadata + thrift(*numbers)), *column)
    return thrift((4, LIST, b"\x1c" + thrift((1, LIST, b"\x1c" + chunk), (3, I64, b"\2"))))


class TestFooters:
    @pytest.mark.parametrize(
        "options",
        [
            {"write_page_index": True},
            {"version": "1.0", "write_statistics": False, "compression": "none"},
            {"version": "2.4", "use_dictionary": False, "data_page_version": "2.0"},
            {"use_dictionary": ["text"], "sorting_columns": [pq.SortingColumn(0)], "write_page_checksum": True},
            {"store_schema": False, "compression": {"i64": "zstd"}},
        ],
    )
    @pytest.mark.parametrize("group_rows", [1, 40])
    def test_are_read_as_pyarrow_reads_them(self, tmp_path, options, group_rows):
        path = tmp_path / "a.parquet"
        write(path, awkward(40), group_rows, **options)
        found = row_groups_of(footer_of(path.read_bytes()), 0, str(path))
        assert len(found) == 40 // group_rows and found == said_by_pyarrow(path)

    def test_cut_short_anywhere_are_corrupt(self, tmp_path):
        path = tmp_path / "a.parquet"
        write(path, awkward(9), 9)
        footer = footer_of(path.read_bytes())
        for length in range(len(footer)):
            with pytest.raises(CorruptData, match="a.parquet is damaged at bytes 77 to ") as caught:
                row_groups_of(footer[:length], 77, str(path))
            assert (caught.value.path, caught.value.offset, caught.value.length) == (str(path), 77, length)

    def test_with_damaged_bytes_are_read_or_corrupt(self, tmp_path):
        path = tmp_path / "a.parquet"
        write(path, awkward(9), 3)
        sound, rng, refused = footer_of(path.read_bytes()), random.Random(0), 0
        for _ in range(2000):
            try:
                row_groups_of(damaged(sound, rng), 0, str(path))
            except CorruptData:
                refused += 1
        assert refused > 500

    @pytest.mark.parametrize(
        "footer, said",
        [
            (b"\x15" + b"\x80" * 11 + b"\0\0", "an integer of 12 bytes"),
            (footer_with(metadata=b"\x56" + b"\xff" * 9 + b"\2\6\0"), "more than 64 bits"),
            (footer_with(metadata=b"\x56" + b"\xff" * 10 + b"\1\6\0"), "more than 10 bytes"),
            (thrift((2, LIST, b"\xfc\xff\xff\xff\xff\x0f")), "4294967295 values in 1 bytes"),
            (thrift((4, LIST, b"\xfc\xff\xff\xff\xff\x0f")), "4294967295 values in 1 bytes"),
            (thrift((6, BINARY, b"\xff\xff\xff\xff\x0f")), "its footer is longer"),
            (b"\x1c" * 10_000, "more than 32 values within one another"),
            (b"\x19" * 10_000, "more than 32 values within one another"),
            (thrift((4, LIST, b"\x15\0")), "a list of the kind 5"),
            (thrift((9, 14, b"")), "a value of the kind 14"),
            (thrift(), "lacks a field that it must have \\(number 4\\)"),
            (thrift((4, LIST, b"\x1c" + thrift((1, LIST, b"\x0c")))), "lacks .* \\(number 3\\)"),
        ],
    )
    def test_with_false_values_are_corrupt(self, footer, said):
        with pytest.raises(CorruptData, match=said):
            row_groups_of(footer, 0, "a.parquet")

    @pytest.mark.parametrize(
        "kind, value",
        [(1, b""), (2, b""), (3, b"\xff"), (4, b"\x80\1"), (7, b"\xff" * 8), (13, b"\xff" * 16), (12, b"\x11\0")]
        + [(8, b"\2\xff\xff"), (9, b"\x21\1\2"), (10, b"\x15\x80\1"), (11, b"\0"), (11, b"\1\x81\1a\1")],
    )
    def test_of_a_later_version_have_fields_that_are_stepped_over(self, kind, value):
        assert row_groups_of(footer_with((50, kind, value)), 0, "x") == [(1, [(5, 7, 6, 9, None, "", False)])]

    def test_with_damaged_size_statistics_do_not_end_the_process(self, tmp_path):
        """pyarrow's ``metadata.row_group(0).column(0)`` ends the process with this file."""
        path = tmp_path / "a.parquet"
        write(path, pa.table({"id": range(10)}))
        sound = path.read_bytes()
        two, one = b"\x29\x06\x19\x26\x00\x14", b"\x29\x06\x19\x16\x94\x00"  # the number of rows of each level
        assert sound.count(two) == 1
        path.write_bytes(sound.replace(two, one))
        with pytest.raises(CorruptData, match=f"row group 0 of {path}, .* histogram size mismatch"):
            read_all(path)

    def test_with_row_groups_of_other_columns_than_the_schemas_are_corrupt(self, tmp_path):
        paths = [tmp_path / name for name in ("one", "two")]
        for path, columns in zip(paths, (["id"], ["id", "text"]), strict=True):
            write(path, numbered(10).select(columns), store_schema=False)
        one, two = (path.read_bytes() for path in paths)
        # A FileMetaData has its version, the schema, the number of rows (here 10), a row group, and
        # its writer.
        (_, groups), (schema, _) = (footer_of(content).split(b"\x16\x14\x19\x1c", 1) for content in (one, two))
        groups = groups[: groups.index(b"parquet-cpp") - 2]  # a field and its length
        paths[0].write_bytes(with_footer(one, schema + b"\x16\x14\x19\x1c" + groups + b"\0"))
        with pytest.raises(CorruptData, match="not all of its row groups have the schema's 2 columns"):
            Parquet().index([str(paths[0])])

    def test_of_an_encrypted_column_name_it_and_others_are_read(self, tmp_path):
        encryption = pytest.importorskip("pyarrow.parquet.encryption")

        class Keys(encryption.KmsClient):
            def wrap_key(self, key_bytes, master_key_identifier):
                return base64.b64encode(key_bytes)

        options = encryption.EncryptionConfiguration(
            footer_key="footer", column_keys={"column": ["text"]}, plaintext_footer=True
        )
        factory = encryption.CryptoFactory(lambda configuration: Keys())
        properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), options)
        path = write(tmp_path / "a.parquet", numbered(10), encryption_properties=properties)
        with pytest.raises(ValueError, match=f"{path}: column 'text' is encrypted"):
            Parquet().index([path])
        assert read_all(path, format=Parquet(columns=("id",))) == {"id": list(range(10))}

    def test_of_a_column_in_another_file_name_both_files_and_a_remedy(self):
        leaf = parquet._Leaf("text", 4, 10, 1, True, 10, "b.parquet", False)
        with pytest.raises(ValueError, match=r"a.parquet: column 'text' lies in 'b.parquet'.*name that file.*columns="):
            leaf.check(0, 1, 100, "a.parquet")


def test_a_file_is_recognized_by_its_magic(tmp_path):
    assert recognise([write(tmp_path / "any", numbered(3))]) == Parquet()
