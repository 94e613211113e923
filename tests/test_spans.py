"""Tensors whose rows interleave in a record are read together, with checksums and without."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verified_loads import note_rounds

import gdsdata
from gdsdata.checkpoint import tensor_reader, tensor_rows
from gdsdata.checkpoint.spans import Gapped, spans_of
from gdsdata.checkpoint.stored import Record, Stored
from gdsdata.checkpoint.tensor_rows import Rows, without_gaps


@pytest.fixture
def reads(monkeypatch):
    """The sizes of all reads that a load asks the engine for."""
    sizes, read = [], tensor_reader.TensorReader._read

    def noted(reader, shared, before, extents):
        sizes.extend(extents.sizes_bytes)
        read(reader, shared, before, extents)

    monkeypatch.setattr(tensor_reader.TensorReader, "_read", noted)
    return sizes


def columns_of(table, wanted=None):
    return {str(i): table[:, i] for i in (range(table.shape[1]) if wanted is None else wanted)}


TARGETS = {
    "contiguous": lambda view: torch.zeros(view.shape, dtype=view.dtype),
    "strided": lambda view: torch.zeros(*view.shape, 2, dtype=view.dtype)[..., 1],
    "cast": lambda view: torch.zeros(view.shape, dtype=torch.float64),
}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [2, 16, 64, 4096])
def test_interleaved_columns_are_one_read(tmp_path, reads, columns, target, verify):
    table = torch.arange(32.0 * columns).reshape(32, columns)
    torch.save(columns_of(table), tmp_path / "x.pt")
    into = {name: TARGETS[target](view) for name, view in columns_of(table).items()}
    how = {"dtype": torch.float64} if target == "cast" else {}
    gdsdata.load(tmp_path / "x.pt", into=into, verify=verify, **how)
    assert all(torch.equal(into[name].float(), view) for name, view in columns_of(table).items())
    assert reads == [table.nbytes]


def test_a_few_of_many_columns_are_one_short_read(tmp_path, reads):
    table = torch.arange(32.0 * 256).reshape(32, 256)
    torch.save(columns_of(table), tmp_path / "x.pt")
    into = {name: torch.zeros(32) for name in ("30", "100", "101")}
    gdsdata.load(tmp_path / "x.pt", into=into, only=list(into))
    assert all(torch.equal(tensor, table[:, int(name)]) for name, tensor in into.items())
    assert len(reads) == 1 and reads[0] < table.nbytes


def test_rows_far_apart_are_read_one_by_one_in_place(tmp_path, reads):
    table = torch.arange(10.0 * 5000).reshape(10, 5000)
    torch.save(columns_of(table, [7, 3000]), tmp_path / "x.pt")
    into = {"7": torch.zeros(10), "3000": torch.zeros(10, 2)[:, 1]}
    gdsdata.load(tmp_path / "x.pt", into=into)
    assert all(torch.equal(tensor, table[:, int(name)]) for name, tensor in into.items())
    assert reads == [4] * 20


def test_spans_are_read_in_rounds_of_bounded_memory(tmp_path, monkeypatch):
    tables = [torch.arange(6000.0).reshape(-1, 4) + 6000 * i for i in range(5)]
    saved = {f"{i}.{name}": view for i, table in enumerate(tables) for name, view in columns_of(table).items()}
    torch.save(saved, tmp_path / "x.pt")
    sizes = note_rounds(monkeypatch, most_bytes=50_000)
    into = {name: torch.zeros(1500) for name in saved}
    gdsdata.load(tmp_path / "x.pt", into=into)
    assert sizes == [48_000, 48_000, 24_000]
    assert all(torch.equal(into[name], view) for name, view in saved.items())


views = st.tuples(
    st.integers(0, 300),  # the first element
    st.integers(1, 20),  # rows
    st.integers(1, 400),  # elements from one to the next
    st.integers(1, 3),  # elements of a row
    st.sampled_from(["contiguous", "strided", "turned"]),
)
dtypes = st.sampled_from([torch.uint8, torch.int16, torch.int64, torch.complex128])


@settings(max_examples=60, deadline=None)
@given(dtypes, st.lists(views, min_size=1, max_size=8), st.integers(8, 4096), st.integers(1, 16), st.integers(0, 4096))
def test_views_that_overlap_in_any_way_have_their_values(tmp_path_factory, dtype, chosen, page, times, short):
    path = tmp_path_factory.mktemp("views") / "x.pt"
    base, saved, into = torch.arange(9000).remainder(251).to(dtype), {}, {}
    for i, (first, rows, step, width, target) in enumerate(chosen):
        view = saved[str(i)] = base.as_strided((rows, width), (step, 1), first)
        into[str(i)] = torch.zeros_like(view.t()).contiguous().t() if target == "turned" else TARGETS[target](view)
    torch.save(saved, path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_rows, "PAGE_BYTES", page)
        patch.setattr(tensor_rows, "_MOST_TIMES_AS_LONG", times)
        patch.setattr(tensor_rows, "_SHORT_READ_BYTES", short)
        gdsdata.load(path, into=into)
    assert all(torch.equal(into[name], view) for name, view in saved.items())


def gapped(offset, rows, step):
    """Return a tensor of ``rows`` of one element each, ``step`` elements apart."""
    stored = Stored(Record(None, 0, 1 << 40), offset, torch.float32, (rows,), (step,))
    return Gapped(torch.empty(0), stored, Rows(stored, without_gaps(stored)), (str(offset),), list)


def test_sparse_tensors_do_not_have_dense_ones_read_row_by_row():
    dense = [gapped(4 * i, 100_000, 1024) for i in range(1024)]  # 400 MiB
    sparse = [gapped(4 * i, 40, 1 << 26) for i in range(5)]
    spans, alone = spans_of([*sparse, *dense])
    assert {one.name for one in alone} <= {one.name for one in sparse}
    assert sum(span.end - span.begin for span in spans) < 30 * dense[0].stored.span_bytes
    assert sorted(len(span.tensors) for span in spans)[-1] >= 512


def test_spans_begin_where_elements_of_any_size_do():
    (span,), alone = spans_of([gapped(4 * i, 10, 50) for i in range(7, 12)])
    assert (span.begin, span.end, len(span.tensors), alone) == (16, 4 * (11 + 9 * 50 + 1), 5, [])


def test_tensors_apart_are_spans_apart():
    spans, alone = spans_of([gapped(100_000 * i, 10, 5) for i in range(3)])
    assert [(span.begin, len(span.tensors)) for span in spans] == [(0, 1), (100_000, 1), (200_000, 1)]
    assert not alone
