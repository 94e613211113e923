"""torch.distributed.checkpoint: what gdsdata writes, torch reads, and the other way round; whole, in parts, or not at all."""

import errno
import io
import os
import pickle
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import MIB, in_new_process, require_direct, run_script
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import DEVICES, assert_same, awkward, bits, tensors, trained, values, zeroed
from test_checkpoint_save import small_disk  # noqa: F401 (a fixture)
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gdsdata
from gdsdata import EngineOptions, GDSStorageReader, GDSStorageWriter
from gdsdata.checkpoint.reading import Reading, Record, Stored
from gdsdata.engine import shared_engine
from gdsdata.errors import CorruptData, IoError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:.*quantize|TypedStorage is deprecated"),
]


def save(state, writer):
    return dcp.save(state, storage_writer=writer)


def loaded(state, reader):
    """What the reader finds for a state of this structure."""
    found = zeroed(state)
    dcp.load(found, storage_reader=reader)
    return found


def odd() -> dict:
    """`awkward` but for what DCP itself does not load into a tensor that is there."""
    left_out = {"expanded", "parameter", "conjugate", "quantized", "storage", "values"}
    state = {key: value for key, value in awkward().items() if key not in left_out}
    return state | {"none": None, "number": 2.5, "text": "text", "bytes": b"bytes", "more": {"tuple": (1, [2]), "empty": {}}}


def many() -> dict:
    return {f"layers.{i}": values(torch.bfloat16, i % 7, 3) for i in range(300)}


WAYS = [(GDSStorageWriter, GDSStorageReader), (GDSStorageWriter, FileSystemReader), (FileSystemWriter, GDSStorageReader)]


@pytest.mark.parametrize(("writer", "reader"), WAYS)
@pytest.mark.parametrize("state", [trained, odd, many, dict, lambda: {"only": "text"}])
def test_what_one_writes_the_other_reads(tmp_path, state, writer, reader):
    state = state()
    save(state, writer(tmp_path))
    assert_same(loaded(state, reader(tmp_path)), state)
    if reader is GDSStorageReader:
        assert_same(loaded(state, reader(tmp_path, verify=True)), state)


@given(st.dictionaries(st.text(max_size=3), tensors | st.none() | st.integers() | st.text(max_size=3), max_size=6))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize(("writer", "reader"), WAYS)
def test_any_state_comes_back(tmp_path, writer, reader, state):
    save(state, writer(tmp_path))
    assert_same(loaded(state, reader(tmp_path)), state)


@pytest.mark.parametrize(
    "arguments",
    [
        {"single_file_per_rank": False},
        {"thread_count": 3},
        {"thread_count": 2, "single_file_per_rank": False},
        {"serialization_format": SerializationFormat.SAFETENSORS},
        {"serialization_format": SerializationFormat.SAFETENSORS, "thread_count": 2},
    ],
)
def test_every_kind_of_file_of_torchs_writer_is_read(tmp_path, arguments):
    state = trained() | {"bytes": b"bytes", "scalar": torch.tensor(2.5)}
    save(state, FileSystemWriter(tmp_path, **arguments))
    assert_same(loaded(state, GDSStorageReader(tmp_path)), state)


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_without_gaps_are_saved_as_they_lie_and_others_are_copied(tmp_path, device):
    base = torch.randn(64, 100, 30, device=device)
    state = {"t": base.permute(2, 0, 1), "view": base[3:9], "gaps": base[:, ::2], "expanded": base[0, :1].expand(40, 30)}
    state |= {"conjugate": torch.randn(40, dtype=torch.complex64, device=device).conj(), "one": base[:1, :, :1]}
    save(state, GDSStorageWriter(tmp_path))
    for reader in (GDSStorageReader(tmp_path), FileSystemReader(tmp_path)):
        found = {key: torch.zeros(value.shape, dtype=value.dtype, device=device) for key, value in state.items()}
        dcp.load(found, storage_reader=reader)
        assert all(torch.equal(found[key], state[key]) for key in state)
    assert torch.load(_item(tmp_path, "t")).stride() == state["t"].stride()
    assert (tmp_path / "__0_0.distcp").stat().st_size < 1.3 * sum(value.nbytes for value in state.values())


def _item(folder, name):
    """The bytes that ``.metadata`` has for a name."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    return io.BytesIO((folder / info.relative_path).read_bytes()[info.offset :][: info.length])


def test_what_only_torch_can_read_is_left_to_it_and_named(tmp_path):
    state = {"quantized": torch.quantize_per_tensor(torch.randn(20), 0.1, 3, torch.quint8), "plain": torch.ones(3)}
    save(state, GDSStorageWriter(tmp_path))
    found = {"quantized": torch.quantize_per_tensor(torch.zeros(20), 0.1, 3, torch.quint8), "plain": torch.zeros(3)}
    with pytest.warns(RuntimeWarning, match="are read by torch.load: it is no plain tensor"):
        dcp.load(found, storage_reader=GDSStorageReader(tmp_path))
    assert torch.equal(found["quantized"], state["quantized"]) and torch.equal(found["plain"], state["plain"])


def test_values_are_cast_to_the_dtype_of_the_tensor_that_is_there(tmp_path):
    save({"a": torch.randn(50, 30)}, GDSStorageWriter(tmp_path))
    ours, torchs = {"a": torch.zeros(50, 30, dtype=torch.bfloat16)}, {"a": torch.zeros(50, 30, dtype=torch.bfloat16)}
    dcp.load(ours, storage_reader=GDSStorageReader(tmp_path))
    dcp.load(torchs, storage_reader=FileSystemReader(tmp_path))
    assert_same(ours, torchs)


def test_long_tensors_begin_on_a_page_of_their_file(tmp_path):
    state = {"b": b"x" * 777} | {str(size): torch.full((size,), 1 + size % 251, dtype=torch.uint8) for size in (9, 4096, 70_000)}
    save(state, GDSStorageWriter(tmp_path))
    content = (tmp_path / "__0_0.distcp").read_bytes()
    for size in (4096, 70_000):
        assert content.index(bytes([1 + size % 251]) * size) % 4096 == 0


# ------------------------------------------------------------------------------------------------ parts of tensors


@st.composite
def boxes(draw):
    """A stored shape, the order of its dimensions in the file, a part of it, and the memory it goes into."""
    shape = draw(st.lists(st.integers(1, 9), max_size=3)) + [draw(st.sampled_from([1, 5, 3000]))]
    order = draw(st.permutations(range(len(shape))))
    offsets = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)]
    target_order = draw(st.one_of(st.just(order), st.permutations(range(len(shape)))))
    return shape, order, offsets, sizes, target_order, draw(st.integers(1, 2))


@given(boxes())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("device", DEVICES)
def test_any_part_of_a_tensor_goes_into_any_memory(tmp_path, device, box):
    shape, order, offsets, sizes, target_order, step = box
    saved = values(torch.int32, *(shape[axis] for axis in order)).permute(*torch.argsort(torch.tensor(order)).tolist())
    path = str(tmp_path / "x")
    Path(path).write_bytes(b"before" + bits(saved.permute(*order)))
    stored = Stored(Record(path, 6, saved.nbytes), 0, torch.int32, tuple(shape), saved.stride())
    memory = torch.zeros([sizes[axis] * step for axis in target_order], dtype=torch.int32, device=device)
    for axis in range(len(shape)):
        memory = memory[(slice(None),) * axis + (slice(None, None, step),)]
    target = memory.permute(*torch.argsort(torch.tensor(target_order)).tolist())
    reading = Reading(EngineOptions(), verify=False)
    reading.tensor_into(target, stored.box(offsets, sizes), "x")
    reading.run()
    for axis, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        saved = saved.narrow(axis, at, size)
    assert torch.equal(target.cpu(), saved)


def test_a_box_beyond_its_tensor_is_refused():
    stored = Stored(Record("x", 0, 48), 0, torch.float32, (3, 4), (4, 1))
    assert stored.box((1, 2), (2, 2)).span_bytes == 24
    for offsets, sizes in (((0, 0), (4, 4)), ((2, 0), (2, 1)), ((-1, 0), (1, 1))):
        with pytest.raises(ValueError, match=r"is not within a tensor of \(3, 4\)"):
            stored.box(offsets, sizes)


def test_of_a_part_only_its_rows_are_read(tmp_path):
    state = {"w": torch.randn(256, 64 * 1024)}  # rows of 256 KiB
    save(state, FileSystemWriter(tmp_path))
    require_direct(tmp_path / "__0_0.distcp")
    options = EngineOptions(workers=2, direct="always", queue_depth=9)  # an engine of its own
    counted = shared_engine(options, torch.device("cpu"))
    (index,) = pickle.loads((tmp_path / ".metadata").read_bytes()).storage_data
    target = torch.zeros(256, 16 * 1024)

    class Quarter(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            item = dcp.ReadItem(
                LoadItemType.TENSOR,
                index, torch.Size((0, 0)), index, torch.Size((0, 16 * 1024)), torch.Size((256, 16 * 1024)),
            )  # fmt: skip
            return dcp.LoadPlan([item])

        def resolve_tensor(self, _):
            return target

    dcp.load({"w": target}, storage_reader=GDSStorageReader(tmp_path, options=options), planner=Quarter())
    assert torch.equal(target, state["w"][:, 16 * 1024 : 32 * 1024])
    assert sum(counted.statistics()["bytes"].values()) == target.nbytes
    assert counted.statistics()["storage_bytes"] < 1.2 * target.nbytes


