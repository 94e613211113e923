"""torch.distributed.checkpoint: torch reads gdsdata's files, and gdsdata torch's."""

import errno
import io
import os
import pickle
import pickletools
import resource
import shutil
import struct
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import MIB, dcp_names_lost_metadata, in_new_process, require_direct
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_checkpoint import DEVICES, assert_same, awkward, bits, tensors, trained, values, zeroed
from test_checkpoint_save import small_disk  # noqa: F401
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import gdsdata
from gdsdata import EngineOptions, GDSLoadPlanner, GDSSavePlanner, GDSStorageReader, GDSStorageWriter
from gdsdata.checkpoint import file_writer
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.stored import Record, Stored
from gdsdata.checkpoint.tensor_reader import TensorReader
from gdsdata.errors import CorruptData, IoError
from gdsdata.io.engine import shared_engine

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
    pytest.mark.filterwarnings("ignore:.*quantize|TypedStorage is deprecated"),
]


def save(state, writer):
    return dcp.save(state, storage_writer=writer)


def loaded(state, reader):
    """Load a state of this structure with the reader."""
    found = zeroed(state)
    dcp.load(found, storage_reader=reader)
    return found


def odd() -> dict:
    """Return `awkward` without the values that DCP itself does not load into an existing tensor."""
    left_out = {"expanded", "parameter", "conjugate", "quantized", "storage", "values"}
    state = {key: value for key, value in awkward().items() if key not in left_out}
    state |= {"none": None, "number": 2.5, "text": "text", "bytes": b"bytes" * 10_000}
    return state | {"more": {"tuple": (1, [2]), "empty": {}}}


def many() -> dict:
    return {f"layers.{i}": values(torch.bfloat16, i % 7, 3) for i in range(300)}


WAYS = [
    (GDSStorageWriter, GDSStorageReader),
    (GDSStorageWriter, FileSystemReader),
    (FileSystemWriter, GDSStorageReader),
]


@pytest.mark.parametrize(("writer", "reader"), WAYS)
@pytest.mark.parametrize("state", [trained, odd, many, dict, lambda: {"only": "text"}])
def test_torch_and_gdsdata_read_each_others_checkpoints(tmp_path, state, writer, reader):
    state = state()
    save(state, writer(tmp_path))
    assert_same(loaded(state, reader(tmp_path)), state)
    if reader is GDSStorageReader:
        assert_same(loaded(state, reader(tmp_path, verify=True)), state)


@pytest.mark.parametrize("state", [odd, many])
def test_a_file_is_the_same_whether_it_is_written_in_one_go_or_in_many(tmp_path, monkeypatch, state):
    state = state()
    save(state, GDSStorageWriter(tmp_path / "one"))
    monkeypatch.setattr(file_writer, "_BATCH_BYTES", 100)
    save(state, GDSStorageWriter(tmp_path / "many"))
    assert (tmp_path / "many" / "__0_0.distcp").read_bytes() == (tmp_path / "one" / "__0_0.distcp").read_bytes()
    assert_same(loaded(state, FileSystemReader(tmp_path / "many")), state)
    assert_same(loaded(state, GDSStorageReader(tmp_path / "many", verify=True)), state)


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


def test_the_ends_of_all_archives_of_torchs_writer_are_read_in_one_call(tmp_path, monkeypatch):
    """Each call waits for a round trip at least if the file is an object."""
    state = {f"layers.{i}": torch.randn(40_000 + i) for i in range(50)}
    save(state, FileSystemWriter(tmp_path))
    calls = []
    read_each = OpenFile.read_each

    def counted(file, offsets, size_bytes):
        calls.append(len(offsets))
        return read_each(file, offsets, size_bytes)

    monkeypatch.setattr(OpenFile, "read_each", counted)
    assert_same(loaded(state, GDSStorageReader(tmp_path)), state)
    assert calls == [2 * len(state)]


@pytest.mark.parametrize("device", DEVICES)
def test_tensors_without_gaps_are_saved_as_they_lie_and_others_are_copied(tmp_path, device):
    base = torch.randn(64, 100, 30, device=device)
    state = {"t": base.permute(2, 0, 1), "view": base[3:9], "gaps": base[:, ::2]}
    state["expanded"] = base[0, :1].expand(40, 30)
    state |= {"conjugate": torch.randn(40, dtype=torch.complex64, device=device).conj(), "one": base[:1, :, :1]}
    save(state, GDSStorageWriter(tmp_path))
    for reader in (GDSStorageReader(tmp_path), FileSystemReader(tmp_path)):
        found = {key: torch.zeros(value.shape, dtype=value.dtype, device=device) for key, value in state.items()}
        dcp.load(found, storage_reader=reader)
        assert all(torch.equal(found[key], state[key]) for key in state)
    assert torch.load(_item(tmp_path, "t")).stride() == state["t"].stride()
    assert (tmp_path / "__0_0.distcp").stat().st_size < 1.3 * sum(value.nbytes for value in state.values())


def _item(folder, name):
    """Return the bytes that ``.metadata`` has for a name."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == name)
    return io.BytesIO((folder / info.relative_path).read_bytes()[info.offset :][: info.length])


def test_a_tensor_that_only_torch_can_read_is_left_to_it_with_a_warning(tmp_path):
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


def noted_places(folder) -> dict:
    """Return, by name, the entries in which the writer noted a tensor's place in its archive."""
    with open(folder / ".metadata", "rb") as file:
        stored = pickle.load(file).storage_data
    return {index.fqn: info for index, info in stored.items() if hasattr(info, "gdsdata_place")}


def test_metadata_says_where_tensors_lie_so_that_archives_are_not_opened(tmp_path, monkeypatch):
    state = odd()
    save(state, GDSStorageWriter(tmp_path))
    assert {"text", "none"}.isdisjoint(noted_places(tmp_path)) and len(noted_places(tmp_path)) > 20
    archived = "gdsdata.checkpoint.dcp.archived_tensors.ArchivedTensors"
    monkeypatch.setattr(archived, lambda *_: pytest.fail("an archive was taken apart"))
    assert_same(loaded(state, GDSStorageReader(tmp_path, verify=True)), state)


def test_metadata_can_be_unpickled_without_gdsdata(tmp_path):
    save(odd(), GDSStorageWriter(tmp_path))
    with open(tmp_path / ".metadata", "rb") as file:
        texts = [said for _, said, _ in pickletools.genops(file) if isinstance(said, str)]
    assert not [said for said in texts if said.split(".")[0].split(" ")[0] == "gdsdata"]


def test_data_files_of_another_checkpoint_are_an_error_and_no_other_bytes(tmp_path):
    """`cp step-200/* latest/` does this: it leaves the old .metadata."""
    weights = {"weight": torch.ones(5000), "bias": torch.ones(4)}
    save(weights, GDSStorageWriter(tmp_path / "old"))
    save({"more": torch.zeros(10**5), **weights}, GDSStorageWriter(tmp_path / "new"))
    shutil.copy(tmp_path / "new" / "__0_0.distcp", tmp_path / "old")
    with pytest.raises(CheckpointException, match="CorruptData"):
        loaded(weights, GDSStorageReader(tmp_path / "old"))


SIZE = object()  # the file's


@pytest.mark.parametrize(
    "lie",
    [None, (), (1, 2), (-1, 0, torch.float32, (50,), (1,), SIZE), (0, 0, torch.float32, (10**9,), (1,), SIZE),
     (0, 0, torch.float32, (50,), (7,), SIZE), (0, 0, "float32", (50,), (1,), SIZE),
     (0, 0, torch.float32, ("a",), (1,), SIZE), (0, 0, torch.float32, (50,), (1,), 1000)],
)  # fmt: skip
def test_a_place_that_cannot_be_is_looked_up_in_the_archive(tmp_path, lie):
    state = {"weight": torch.arange(50.0)}
    save(state, GDSStorageWriter(tmp_path))
    with open(tmp_path / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    (info,) = metadata.storage_data.values()
    size = (tmp_path / info.relative_path).stat().st_size
    info.gdsdata_place = lie and tuple(size if one is SIZE else one for one in lie)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_same(loaded(state, GDSStorageReader(tmp_path)), state)


def test_long_tensors_begin_on_a_page_of_their_file(tmp_path):
    sizes = (9, 4096, 70_000)
    state = {str(size): torch.full((size,), 1 + size % 251, dtype=torch.uint8) for size in sizes} | {"b": b"x" * 777}
    save(state, GDSStorageWriter(tmp_path))
    content = (tmp_path / "__0_0.distcp").read_bytes()
    for size in (4096, 70_000):
        assert content.index(bytes([1 + size % 251]) * size) % 4096 == 0


# ------------------------------------------------------------------------------------------------ parts of tensors


@st.composite
def boxes(draw):
    """Draw a stored shape, its order of dimensions in the file, a part of it, and its target."""
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
    stored = Stored(Record(OpenFile(path), 6, saved.nbytes), 0, torch.int32, tuple(shape), saved.stride())
    memory = torch.zeros([sizes[axis] * step for axis in target_order], dtype=torch.int32, device=device)
    for axis in range(len(shape)):
        memory = memory[(slice(None),) * axis + (slice(None, None, step),)]
    target = memory.permute(*torch.argsort(torch.tensor(target_order)).tolist())
    reading = TensorReader(EngineOptions(), verify=False)
    reading.tensor_into(target, stored.box(offsets, sizes), ("x",))
    reading.run()
    for axis, (at, size) in enumerate(zip(offsets, sizes, strict=True)):
        saved = saved.narrow(axis, at, size)
    assert torch.equal(target.cpu(), saved)


def test_a_box_beyond_its_tensor_is_refused():
    stored = Stored(Record(None, 0, 48), 0, torch.float32, (3, 4), (4, 1))
    assert stored.box((1, 2), (2, 2)).span_bytes == 24
    for offsets, sizes in (((0, 0), (4, 4)), ((2, 0), (2, 1)), ((-1, 0), (1, 1))):
        with pytest.raises(ValueError, match=r"is not within a tensor of \(3, 4\)"):
            stored.box(offsets, sizes)


def test_a_part_of_a_tensor_is_loaded_by_reading_its_rows_alone(tmp_path):
    state = {"w": torch.randn(256, 64 * 1024)}  # rows of 256 KiB
    save(state, FileSystemWriter(tmp_path))
    require_direct(tmp_path / "__0_0.distcp")
    options = EngineOptions(workers=2, direct="always", queue_depth=9)  # its own engine
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


# ------------------------------------------------------------------------------------------------ planning


def both_plans(state, folder, **arguments):
    """Return the plans or errors of torch's planner and of ours, set up alike, in a fixed order."""
    metadata = folder if isinstance(folder, dcp.Metadata) else FileSystemReader(folder).read_metadata()
    plans, set_up = [], []
    for kind in (dcp.DefaultLoadPlanner, GDSLoadPlanner):
        planner = kind(**arguments)
        planner.set_up_planner(state, metadata, is_coordinator=True)
        try:
            items = planner.create_local_plan().items
        except RuntimeError as error:
            plans.append(str(error))
            continue
        set_up.append((planner.state_dict.keys(), planner.mappings))
        assert all(planner.lookup_tensor(item.dest_index) is not None for item in items if item.type.name == "TENSOR")
        plans.append(sorted(items, key=repr))
    assert not set_up or (len(set_up) == 2 and set_up[0] == set_up[1])
    return plans


def both_save_plans(state, **arguments):
    plans = []
    for kind in (dcp.DefaultSavePlanner, GDSSavePlanner):
        planner = kind(**arguments)
        planner.set_up_planner(state, is_coordinator=True)
        plan = planner.create_local_plan()
        found = [planner.lookup_object(item.index) for item in plan.items]
        whole = planner.create_global_plan([plan])
        hints = [item.index.index for item in whole[0][0].items]
        tensors_found = [id(value) for value in found if isinstance(value, torch.Tensor)]
        plans.append((plan, planner.mappings, tensors_found, whole, hints))
    return plans


def are_distinct(values):
    """Return whether torch distinguishes the keys of a dict: it takes 0 for "0"."""
    return len(set(map(str, values))) == len(values)


values_of_states = st.recursive(
    tensors | st.none() | st.integers() | st.tuples(st.floats(allow_nan=False), st.booleans()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 2), inner, max_size=3).filter(are_distinct)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=3), values_of_states, max_size=4))
@example({"a": [torch.ones(2), {}]})
@example({"a": [{}, torch.ones(2)], "b": [{"c": {}}, {"c": 1}]})
@example({"a.b": torch.ones(2), "a": {"b": torch.ones(3)}})
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_plans_are_those_of_torchs_planners(tmp_path, state):
    try:
        save(state, FileSystemWriter(tmp_path))
    except CheckpointException:  # flattening gives two values the same name
        with pytest.raises(CheckpointException):
            dcp.save(state, storage_writer=GDSStorageWriter(tmp_path), planner=GDSSavePlanner())
        return
    theirs, ours = both_plans(state, tmp_path)
    assert ours == theirs
    theirs, ours = both_save_plans(state)
    assert ours == theirs


def test_a_save_that_is_not_to_flatten_does_not():
    theirs, ours = both_save_plans(trained(), flatten_state_dict=False)
    assert ours == theirs and {item.index.fqn for item in ours[0].items} == trained().keys()


def test_plans_are_remembered_where_that_is_asked_for(tmp_path, monkeypatch):
    for remembered in [name for name in vars(dcp.SavePlanner) if name.startswith("_cached_")]:
        monkeypatch.setattr(dcp.SavePlanner, remembered, {})
    planner, usable = GDSSavePlanner(enable_plan_caching=True), []
    made = planner.create_local_plan
    planner.create_local_plan = lambda: usable.append(made()) or usable[-1]
    for step in range(2):
        state = {"model": many(), "step": step}
        dcp.save(state, storage_writer=GDSStorageWriter(tmp_path / str(step)), planner=planner)
        assert_same(loaded(state, GDSStorageReader(tmp_path / str(step))), state)
    assert [plan.usable for plan in usable] == [True, False], "the second plan is that of the first"


@pytest.mark.parametrize("state", [trained, odd, many])
@pytest.mark.parametrize("reader", [GDSStorageReader, FileSystemReader])
def test_states_that_were_planned_so_come_back(tmp_path, state, reader):
    state = state()
    dcp.save(state, storage_writer=GDSStorageWriter(tmp_path), planner=GDSSavePlanner())
    theirs, ours = both_plans(state, tmp_path)
    assert ours == theirs
    found = zeroed(state)
    dcp.load(found, storage_reader=reader(tmp_path), planner=GDSLoadPlanner())
    assert_same(found, state)


def test_a_tensor_that_was_saved_in_parts_is_planned_in_parts():
    chunks = [dcp.ChunkStorageMetadata(torch.Size((at, 0)), torch.Size((2, 5))) for at in (0, 2)]
    properties = TensorProperties(torch.float32)
    metadata = dcp.Metadata(
        {
            "in parts": dcp.TensorStorageMetadata(properties, torch.Size((4, 5)), chunks),
            "a part of it": dcp.TensorStorageMetadata(properties, torch.Size((4, 5)), chunks[1:]),
            "whole": dcp.TensorStorageMetadata(properties, torch.Size((2, 5)), chunks[:1]),
            "twice": dcp.TensorStorageMetadata(properties, torch.Size((2, 5)), [chunks[0], chunks[0]]),
            "elsewhere": dcp.TensorStorageMetadata(properties, torch.Size((2, 5)), chunks[1:]),
        }
    )
    state = {name: torch.zeros(stored.size) for name, stored in metadata.state_dict_metadata.items()}
    theirs, ours = both_plans(state, metadata)
    assert ours == theirs
    assert len(ours) == 2 + 1 + 1 + 2 + 0


def in_shards(whole) -> torch.Tensor:
    """Make a plain tensor that holds two parts of `whole`, with an unused row between them."""
    tensor = torch.cat([whole[2:], torch.full((1, whole.shape[1]), -1.0), whole[:2]])
    tensor.global_shape, tensor.global_offsets = tuple(whole.shape), ((2, 0), (0, 0))
    tensor.local_offsets, tensor.local_sizes = ((0, 0), (3, 0)), ((2, whole.shape[1]),) * 2
    return tensor


def test_a_plain_tensor_that_says_it_holds_parts_of_another_is_planned_in_parts(tmp_path):
    pytest.importorskip("torch.distributed.checkpoint.protocol")
    whole = torch.randn(4, 5)
    state = {"model": {"w": in_shards(whole), "b": torch.ones(3)}}
    theirs, ours = (plan for plan, *_ in both_save_plans(state))
    assert ours == theirs and len(ours.items) == 3
    dcp.save(state, storage_writer=GDSStorageWriter(tmp_path), planner=GDSSavePlanner())
    found = {"model": {"w": in_shards(torch.zeros(4, 5)), "b": torch.zeros(3)}}
    dcp.load(found, storage_reader=GDSStorageReader(tmp_path), planner=GDSLoadPlanner())
    assert_same(found, state)
    found = {"model": {"w": torch.zeros(4, 5), "b": torch.zeros(3)}}
    dcp.load(found, storage_reader=GDSStorageReader(tmp_path), planner=GDSLoadPlanner())
    assert torch.equal(found["model"]["w"], whole)


def test_names_that_are_not_there_are_left_to_torchs_planner(tmp_path):
    save({"a": torch.ones(3), "b": {"c": torch.ones(2)}}, FileSystemWriter(tmp_path))
    theirs, ours = both_plans({"a": torch.zeros(3)}, tmp_path)  # not all of the checkpoint
    assert ours == theirs and len(ours) == 1
    more = {"a": torch.zeros(3), "b": {"c": torch.zeros(2)}, "d": torch.zeros(1)}
    theirs, ours = both_plans(more, tmp_path, allow_partial_load=True)
    assert ours == theirs and len(ours) == 2
    reader = GDSStorageReader(tmp_path)
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: d"):
        dcp.load(more, storage_reader=reader, planner=GDSLoadPlanner())
    other = {"a": torch.zeros(4), "b": {"c": torch.zeros(2)}}
    with pytest.raises(CheckpointException, match="Size mismatch"):
        dcp.load(other, storage_reader=reader, planner=GDSLoadPlanner())


# ------------------------------------------------------------------------------------------------ ranks


def on_ranks(count, function, folder, *arguments):
    """Return each rank's ``function(rank, folder, *arguments)`` in a new gloo group."""
    shutil.rmtree(folder / "ranks", ignore_errors=True)
    (folder / "ranks").mkdir()
    with ThreadPoolExecutor(count) as pool:
        ranks = range(count)
        calls = [pool.submit(in_new_process, _as_rank, rank, count, function, folder, arguments) for rank in ranks]
        return [call.result() for call in calls]


def _as_rank(rank, count, function, folder, arguments):
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "localhost", "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/ranks/store", count), rank=rank, world_size=count)
    try:
        return function(rank, folder, *arguments)
    finally:
        dist.destroy_process_group()


def _sharded(seed):
    """Return the state of an FSDP2 model after a step, and the same state gathered."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(65, 33), torch.nn.ReLU(), torch.nn.Linear(33, 7))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 65)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": of_model, "optimizer": of_optimizer, "step": seed}
    return state, _whole(state)


def _whole(nest):
    if isinstance(nest, dict):
        return {key: _whole(value) for key, value in nest.items()}
    if isinstance(nest, list):
        return [_whole(value) for value in nest]
    return nest.full_tensor().clone() if isinstance(nest, DTensor) else nest


def _save_and_load_sharded(rank, folder):
    state, whole = _sharded(seed=1)
    save(state, GDSStorageWriter(folder / "ours"))
    save(state, FileSystemWriter(folder / "torchs"))
    for name, reader in (("ours", GDSStorageReader), ("ours", FileSystemReader), ("torchs", GDSStorageReader)):
        for planner in (dcp.DefaultLoadPlanner(), GDSLoadPlanner()):
            found, other = _sharded(seed=2)
            assert not torch.equal(other["model"]["0.weight"], whole["model"]["0.weight"])
            dcp.load(found, storage_reader=reader(folder / name), planner=planner)
            assert_same(_whole(found), whole)
    if rank == 0:
        torch.save(whole, folder / "whole.pt")
    return sorted(os.listdir(folder / "ours"))


def _load_sharded_and_save(rank, folder, name, saved_as):
    state, _ = _sharded(seed=3)
    dcp.load(state, storage_reader=GDSStorageReader(folder / name, verify=True))
    assert_same(_whole(state), torch.load(folder / "whole.pt"))
    save(state, GDSStorageWriter(folder / saved_as))


def test_sharded_models_come_back_on_any_number_of_ranks(tmp_path):
    names = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert on_ranks(2, _save_and_load_sharded, tmp_path) == [names, names]
    on_ranks(1, _load_sharded_and_save, tmp_path, "ours", "of one")
    on_ranks(2, _load_sharded_and_save, tmp_path, "of one", "of two")


def _reshard(rank, folder):
    whole = torch.arange(90.0 * 2100).reshape(90, 2100)
    mesh, flat = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    ways = [
        (flat, [Shard(0)]), (flat, [Shard(1)]), (flat, [Replicate()]),
        (mesh, [Shard(0), Shard(1)]), (mesh, [Shard(1), Replicate()]), (mesh, [Replicate(), Shard(0)]),
    ]  # fmt: skip
    for i, (of_mesh, placements) in enumerate(ways):
        save({"w": distribute_tensor(whole, of_mesh, placements)}, GDSStorageWriter(folder / str(i)))
        for other_mesh, other in (ways[i - 1], ways[i - 3]):
            found = {"w": distribute_tensor(torch.zeros_like(whole), other_mesh, other)}
            dcp.load(found, storage_reader=GDSStorageReader(folder / str(i)))
            assert torch.equal(found["w"].full_tensor(), whole), (placements, other)


def test_tensors_change_their_placement_on_the_way(tmp_path):
    on_ranks(4, _reshard, tmp_path)


# ------------------------------------------------------------------------------------------------ asynchronous saves


def _save_asynchronously(rank, folder):
    for kind in (AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS):
        for step in range(2):
            state = {"w": torch.full((70_000,), float(step)), "step": step}
            writer = GDSStorageWriter(folder / kind.value)
            future = dcp.async_save(state, storage_writer=writer, async_checkpointer_type=kind)
            state["w"].fill_(7)  # it was staged
            future.result()
            found = {"w": torch.zeros(70_000), "step": None}
            dcp.load(found, storage_reader=GDSStorageReader(folder / kind.value, verify=True))
            assert (found["w"] == step).all() and found["step"] == step
        assert len(list((folder / kind.value).iterdir())) == 2


@pytest.mark.timeout(180)
def test_saves_in_the_background_by_a_thread_and_by_a_process(tmp_path):
    on_ranks(1, _save_asynchronously, tmp_path)


def test_a_writer_is_pickled(tmp_path):
    save({"a": torch.ones(5)}, writer := GDSStorageWriter(tmp_path / "x", options=EngineOptions(workers=2)))
    again = pickle.loads(pickle.dumps(writer))
    save({"a": torch.ones(5)}, again)
    assert again.options == writer.options


# ------------------------------------------------------------------------------------------------ errors


def _fail_on_rank_1(rank, folder):
    w = distribute_tensor(torch.ones(50_000), init_device_mesh("cpu", (2,)), [Shard(0)])
    save({"w": w}, GDSStorageWriter(folder / "x"))
    before = {path.name: path.read_bytes() for path in (folder / "x").iterdir()}
    dist.barrier()
    options = EngineOptions(workers=2, faults="seed=1,fail=1" if rank == 1 else "")
    try:
        save({"w": w * 2}, GDSStorageWriter(folder / "x", options=options))
    except CheckpointException as error:
        failures = {rank: type(failure[0]) for rank, failure in error.failures.items()}
    dist.barrier()
    after = {path.name: path.read_bytes() for path in (folder / "x").iterdir()}
    assert before.items() <= after.items() and not any("tmp" in name for name in after)
    found = {"w": distribute_tensor(torch.zeros(50_000), w.device_mesh, [Shard(0)])}
    dcp.load(found, storage_reader=GDSStorageReader(folder / "x"))
    assert torch.equal(found["w"].full_tensor(), torch.ones(50_000))
    dist.barrier()
    save({"w": w * 3}, GDSStorageWriter(folder / "x"))
    dist.barrier()
    assert len(list((folder / "x").iterdir())) == 3, "leftovers of the failed save are gone"
    return failures


def test_an_error_on_one_rank_is_raised_on_all_and_leaves_the_old_checkpoint(tmp_path):
    assert on_ranks(2, _fail_on_rank_1, tmp_path) == [{1: IoError}, {1: IoError}]


def failure_of(call, *arguments):
    """Return the cause of DCP's own error."""
    with pytest.raises(CheckpointException) as caught:
        call(*arguments)
    (failure,) = caught.value.failures.values()
    return failure[0]


def load_and_verify(state, folder):
    dcp.load(state, storage_reader=GDSStorageReader(folder, verify=True))


def test_files_that_are_missing_cut_or_damaged_are_errors_that_name_them(tmp_path):
    state = {"a": torch.randn(70, 2000), "b": torch.randn(3)}
    save(state, GDSStorageWriter(tmp_path))
    file = tmp_path / "__0_0.distcp"
    content = file.read_bytes()
    at = content.index(bits(state["a"])) + 1000
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    loaded(state, GDSStorageReader(tmp_path))
    error = failure_of(loaded, state, GDSStorageReader(tmp_path, verify=True))
    assert isinstance(error, CorruptData) and "a in" in str(error) and "checksum" in str(error)
    strided = {"a": torch.zeros(70, 4000)[:, 1::2], "b": torch.zeros(3)}
    rows = {"a": torch.zeros(70, 4000)[:, 2000:], "b": torch.zeros(3)}
    for target in (strided, rows):
        dcp.load(target, storage_reader=GDSStorageReader(tmp_path))
        error = failure_of(load_and_verify, target, tmp_path)
        assert isinstance(error, CorruptData) and "a in" in str(error)
    file.write_bytes(content[:-1])
    error = failure_of(loaded, state, GDSStorageReader(tmp_path))
    assert isinstance(error, CorruptData) and "the file was cut, or is of another checkpoint" in str(error)
    file.write_bytes(content[: len(content) // 2])
    assert isinstance(failure_of(loaded, state, GDSStorageReader(tmp_path)), CorruptData)
    file.unlink()
    error = failure_of(loaded, state, GDSStorageReader(tmp_path))
    assert isinstance(error, FileNotFoundError) and str(file) in str(error)
    (tmp_path / ".metadata").unlink()
    failure_of(loaded, state, GDSStorageReader(tmp_path))


@pytest.mark.parametrize("instruction", [b"r\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8], ids=["memo", "frame"])
def test_damaged_metadata_is_corrupt_data_before_memory_is_allocated(tmp_path, instruction):
    save({"a": torch.arange(20)}, FileSystemWriter(tmp_path))
    file = tmp_path / ".metadata"
    content = file.read_bytes()
    at = content.index(b"\x94")  # behind the name of a module
    file.write_bytes(content[:at] + instruction + content[at:])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 512 * MIB, limits[1]))
    try:
        with pytest.raises(CorruptData, match=f"'{file}' cannot be unpickled"):
            GDSStorageReader(tmp_path).read_metadata()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_changed_byte_of_metadata_is_corrupt_data(tmp_path):
    save({"a": torch.arange(20)}, GDSStorageWriter(tmp_path))
    file = tmp_path / ".metadata"
    content = file.read_bytes()
    for at in range(0, content.index(b"gdsdata-crc32"), 7):
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CorruptData, match=f"'{file}' cannot be unpickled"):
            GDSStorageReader(tmp_path).read_metadata()


def test_metadata_that_describes_no_state_is_corrupt_data(tmp_path):
    save({"a": torch.arange(20)}, FileSystemWriter(tmp_path))
    file = tmp_path / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"state_dict_metadata", b"state_dict_metadatb"))
    with pytest.raises(CorruptData, match="it describes no state"):
        GDSStorageReader(tmp_path).read_metadata()


def change_metadata(folder, change):
    """Have `change` change the metadata of a checkpoint, which then has no checksum."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["relative_path", "offset", "length", "chunks", "sizes"])
def test_damaged_metadata_without_a_checksum_names_its_file(tmp_path, name):
    save({"a": torch.arange(20)}, FileSystemWriter(tmp_path))

    def change(metadata):
        about, (info,) = metadata.state_dict_metadata["a"], metadata.storage_data.values()
        for one in (about, about.chunks[0], info):
            if hasattr(one, name):
                delattr(one, name)

    change_metadata(tmp_path, change)
    with pytest.raises(CorruptData, match=f"'{tmp_path / '.metadata'}' cannot be unpickled: it does not"):
        GDSStorageReader(tmp_path).read_metadata()


def test_metadata_that_does_not_say_where_a_part_lies_is_corrupt_data(tmp_path):
    save({"a": torch.arange(20)}, FileSystemWriter(tmp_path))
    change_metadata(tmp_path, lambda metadata: metadata.storage_data.clear())
    error = failure_of(loaded, {"a": torch.arange(20)}, GDSStorageReader(tmp_path))
    assert isinstance(error, CorruptData) and f"'{tmp_path / '.metadata'}' does not say where" in str(error)


@pytest.mark.parametrize(
    "boxes",
    [[((0, 0), (2, 5))], [((0, 0), (2, 5)), ((3, 0), (1, 5))], [((0, 0), (2, 5)), ((1, 0), (2, 5))],
     [((0, 0), (2, 5)), ((2, 0), (2, 4))], [((9, 9), (4, 5))], []],
)  # fmt: skip
@pytest.mark.parametrize("planner", [dcp.DefaultLoadPlanner, GDSLoadPlanner])
def test_parts_that_do_not_make_a_tensor_are_refused(tmp_path, boxes, planner):
    save({"a": torch.randn(4, 5), "b": torch.ones(3)}, FileSystemWriter(tmp_path))

    def change(metadata):
        chunks = [dcp.ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
        metadata.state_dict_metadata["a"].chunks = chunks

    change_metadata(tmp_path, change)
    state = {"a": torch.zeros(4, 5), "b": torch.zeros(3)}
    error = failure_of(lambda: dcp.load(state, storage_reader=GDSStorageReader(tmp_path), planner=planner()))
    assert isinstance(error, CorruptData) and "parts of a " in str(error) and ".metadata'" in str(error)
    dcp.load({"b": torch.zeros(3)}, storage_reader=GDSStorageReader(tmp_path), planner=planner())


def test_a_stored_part_of_another_shape_is_refused(tmp_path):
    save({"a": torch.randn(4, 5)}, FileSystemWriter(tmp_path))

    def change(metadata):
        about = metadata.state_dict_metadata["a"]
        about.size = about.chunks[0].sizes = torch.Size((3, 5))

    change_metadata(tmp_path, change)
    error = failure_of(loaded, {"a": torch.zeros(3, 5)}, GDSStorageReader(tmp_path))
    assert isinstance(error, CorruptData) and "a part of (3, 5) of a" in str(error)


def test_a_rank_that_saved_its_own_part_alone_loads_it_again(tmp_path):
    part = torch.randn(2, 5)
    part.global_shape, part.global_offsets = (4, 5), ((2, 0),)
    part.local_offsets, part.local_sizes = ((0, 0),), ((2, 5),)
    save({"a": part}, GDSStorageWriter(tmp_path))
    found = part.clone().zero_()
    vars(found).update(vars(part))
    dcp.load({"a": found}, storage_reader=GDSStorageReader(tmp_path))
    assert torch.equal(found, part)


@pytest.mark.filterwarnings("ignore:.*are read by torch.load", "error:.*has no checksums")
def test_verify_compares_the_checksums_of_values_that_are_no_plain_tensors(tmp_path):
    state = {"step": 123456789, "q": torch.quantize_per_tensor(torch.arange(50.0), 0.5, 3, torch.quint8)}
    save(state, GDSStorageWriter(tmp_path))
    load_and_verify(state, tmp_path)
    file = tmp_path / "__0_0.distcp"
    content = file.read_bytes()
    for name, value in (("step", struct.pack("<i", 123456789)), ("q", bytes(state["q"].int_repr().tolist()))):
        damaged = bytearray(content)
        damaged[content.index(value)] ^= 1
        file.write_bytes(damaged)
        error = failure_of(load_and_verify, state, tmp_path)
        assert isinstance(error, CorruptData) and f"{name} in '{file}'" in str(error)


@pytest.mark.filterwarnings("ignore:.*are read by torch.load")
def test_a_damaged_file_loads_or_is_an_error_and_nothing_else(tmp_path):
    state = {"a": torch.randn(20), "b": values(torch.float8_e5m2, 5, 7), "c": [1, 2]}
    save(state, GDSStorageWriter(tmp_path))
    file = tmp_path / "__0_0.distcp"
    content = file.read_bytes()
    rng = torch.Generator().manual_seed(1)
    ends = 0
    for _ in range(150):
        damaged = bytearray(content)
        for at in torch.randint(len(content), (3,), generator=rng).tolist():
            damaged[at] ^= 1 << int(torch.randint(8, (1,), generator=rng))
        file.write_bytes(damaged)
        try:
            loaded(state, GDSStorageReader(tmp_path))
        except CheckpointException:
            ends += 1
    assert 0 < ends < 150


@pytest.mark.parametrize("name", ["/proc/gdsdata", "file/below"])
def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, name):
    (tmp_path / "file").touch()
    assert isinstance(failure_of(save, {"a": torch.ones(3)}, GDSStorageWriter(tmp_path / name)), OSError)


def test_a_disk_without_room_leaves_the_old_checkpoint_and_nothing_else(small_disk):  # noqa: F811
    save({"a": torch.ones(100_000)}, GDSStorageWriter(small_disk))
    before = {path.name: path.read_bytes() for path in small_disk.iterdir()}
    error = failure_of(save, {"a": torch.zeros(200_000)}, GDSStorageWriter(small_disk))
    assert isinstance(error, IoError) and error.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in small_disk.iterdir()} == before


# ------------------------------------------------------------------------------------------------ the old and the new


class Crash(BaseException):
    pass


def crash(*_):
    raise Crash


def test_a_save_that_dies_before_its_metadata_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    state = {"a": torch.ones(70_000), "step": 1}
    save(state, GDSStorageWriter(tmp_path))
    for step in (2, 3):
        with monkeypatch.context() as patched:
            patched.setattr(GDSStorageWriter, "finish", crash)
            with pytest.raises((Crash, CheckpointException)):
                save({"a": torch.full((70_000,), float(step)), "step": step}, GDSStorageWriter(tmp_path))
        assert len(list(tmp_path.iterdir())) == 1 + step, "the data of each failed save are there"
        for reader in (GDSStorageReader, FileSystemReader):
            assert_same(loaded(state, reader(tmp_path)), state)
    (tmp_path / "__0_0.distcp.123-4.tmp").touch()
    (tmp_path / "of_the_user.distcp").touch()
    save(state | {"step": 4}, GDSStorageWriter(tmp_path))
    assert loaded(state, GDSStorageReader(tmp_path))["step"] == 4
    assert len(list(tmp_path.iterdir())) == 3 and (tmp_path / "of_the_user.distcp").exists()


def test_a_save_that_dies_in_an_empty_folder_is_no_checkpoint(tmp_path, monkeypatch):
    state = {"a": torch.ones(5)}
    with monkeypatch.context() as patched, pytest.raises((Crash, CheckpointException)):
        patched.setattr(GDSStorageWriter, "finish", crash)
        save(state, GDSStorageWriter(tmp_path / "x"))
    error = failure_of(loaded, state, GDSStorageReader(tmp_path / "x"))
    assert "metadata" in str(error) or not dcp_names_lost_metadata()
    save(state, GDSStorageWriter(tmp_path / "x"))
    assert sorted(os.listdir(tmp_path / "x")) == [".metadata", "__0_0.distcp"]
    assert_same(loaded(state, FileSystemReader(tmp_path / "x")), state)


def test_a_load_whose_checkpoint_is_replaced_meanwhile_says_to_load_again(tmp_path):
    class Late(GDSStorageReader):
        def read_data(self, plan, planner):
            save({"a": torch.zeros(5)}, GDSStorageWriter(tmp_path))
            return super().read_data(plan, planner)

    save({"a": torch.ones(5)}, GDSStorageWriter(tmp_path))
    error = failure_of(loaded, {"a": torch.ones(5)}, Late(tmp_path))
    assert isinstance(error, FileNotFoundError) and "If a save has replaced it meanwhile, load it again" in str(error)


def test_one_writer_saves_again_and_again(tmp_path):
    writer = GDSStorageWriter(tmp_path)
    for step in range(3):
        save({"a": torch.full((9,), float(step))}, writer)
        assert loaded({"a": torch.zeros(9)}, GDSStorageReader(tmp_path))["a"][0] == step
        assert len(list(tmp_path.iterdir())) == 2
    dcp.save({"a": torch.ones(9)}, checkpoint_id=tmp_path / "other", storage_writer=writer)
    assert sorted(os.listdir(tmp_path / "other")) == [".metadata", "__0_0.distcp"]
    error = failure_of(save, {"a": torch.ones(9)}, GDSStorageWriter(tmp_path, overwrite=False))
    assert "already exists" in str(error)


def test_cached_plans_do_not_reuse_old_file_names(tmp_path):
    for folder in (tmp_path / "x", tmp_path / "x", tmp_path / "y", tmp_path / "x"):
        for value in (1.0, 2.0):
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            state = {"a": torch.full((9,), value), "b": value}
            before = set(os.listdir(folder)) - {".metadata"} if folder.exists() else set()
            dcp.save(state, storage_writer=GDSStorageWriter(folder), planner=planner)
            assert before.isdisjoint(os.listdir(folder))
            for reader in (GDSStorageReader(folder), FileSystemReader(folder)):
                assert_same(loaded(state, reader), state)


@pytest.mark.filterwarnings("ignore:.*barrier")
def test_each_rank_can_have_metadata_of_its_own(tmp_path):
    for step in range(2):
        state = {"a": torch.full((9,), float(step))}
        dcp.save(state, storage_writer=GDSStorageWriter(tmp_path), use_collectives=False)
        assert "__0.metadata" in os.listdir(tmp_path) and len(os.listdir(tmp_path)) == 2
        for reader in (GDSStorageReader(tmp_path), FileSystemReader(tmp_path)):
            assert_same(loaded(state, reader), state)
    (tmp_path / "__1_0.distcp").touch()  # of another rank
    dcp.save(state, storage_writer=GDSStorageWriter(tmp_path), use_collectives=False)
    assert (tmp_path / "__1_0.distcp").exists()


def test_memory_beside_the_tensors_is_bounded(tmp_path, monkeypatch):
    state = {str(i): torch.randn(30, 50).t() for i in range(20)}
    save({key: value.contiguous() for key, value in state.items()}, GDSStorageWriter(tmp_path))
    most, runs = 0, 0
    run = TensorReader.run

    def watched(reading):
        nonlocal most, runs
        most, runs = max(most, reading.own_bytes), runs + (reading.own_bytes > 0)
        run(reading)

    monkeypatch.setattr(TensorReader, "run", watched)
    monkeypatch.setattr(gdsdata.checkpoint.tensor_reader, "MOST_OWN_BYTES", 15_000)
    assert_same(loaded(state, GDSStorageReader(tmp_path)), state)
    assert (most, runs) == (3 * 6000, 7)
