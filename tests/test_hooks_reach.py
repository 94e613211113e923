"""`torch_hooks` reach every way to torch's checkpoint functions, and report what they served."""

import concurrent.futures
import gc
import inspect
import io
import os
import pickle
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from helpers import eventually, sharded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_checkpoint import assert_same, awkward, bits, nests, trained
from test_dcp import on_ranks
from torch import load as load_by_early_name
from torch import save as save_by_early_name
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType

import gdsdata
import gdsdata.safetensors
from gdsdata import torch_private
from gdsdata.checkpoint import hooks, hooks_dcp, hooks_files, hooks_report
from gdsdata.checkpoint.dcp.storage_reader import GDSStorageReader
from gdsdata.checkpoint.dcp.storage_writer import GDSStorageWriter
from gdsdata.checkpoint.safetensors import files
from gdsdata.checkpoint.torch_zip import mapped_storages
from gdsdata.errors import IoError, NotReplaceable
from gdsdata.io import engine

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*quantize|TypedStorage is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled|Detected an existing checkpoint"),
]
STATE = {"a": torch.arange(5000), "b": torch.arange(7.0), "c": [torch.empty(0), "x", 2.5]}
IN_MEMORY = "it is in memory (io.BytesIO): pass a path, or with Lightning use GDSCheckpointIO"


def served(hooks, call: str) -> int:
    return getattr(hooks.report().served.get(call), "calls", 0)


def reasons(hooks) -> list[tuple[str, str]]:
    return [(one.call, one.reason) for one in hooks.report().left_to_torch]


# --- names ------------------------------------------------------------------------------------------------------------


def test_names_that_were_imported_before_reach_gdsdata(tmp_path):
    with gdsdata.torch_hooks() as hooks:
        save_by_early_name(STATE, tmp_path / "x.pt")
        assert_same(load_by_early_name(tmp_path / "x.pt"), STATE)
    assert (served(hooks, "torch.save"), served(hooks, "torch.load"), reasons(hooks)) == (1, 1, [])


def test_a_zip_writer_of_torchs_own_works_under_hooks(tmp_path):
    with gdsdata.torch_hooks():
        with torch.serialization._open_zipfile_writer(str(tmp_path / "x.zip")) as writer:
            writer.write_record("one", b"abc", 3)
        with torch.serialization._open_zipfile_reader(open(tmp_path / "x.zip", "rb")) as reader:
            assert reader.get_record("one") == b"abc"
    gc.collect()


newer_load = pytest.mark.skipif(
    "weights_only" not in inspect.signature(torch_private.serialization_seams()[torch_private.LOAD_ZIP]).parameters,
    reason="this torch does not take it",
)


@pytest.mark.parametrize("said", [{}, pytest.param({"weights_only": True}, marks=newer_load)])
def test_a_torch_that_names_weights_only_by_its_pickle_module_is_served(tmp_path, said):
    """As torch 2.11 does."""
    torch.save({"model": Unknown(), "a": torch.ones(3)}, tmp_path / "x.pt")
    torch.save(STATE, tmp_path / "y.pt")
    with (
        gdsdata.torch_hooks() as hooks,
        open(tmp_path / "x.pt", "rb") as unknown,
        open(tmp_path / "y.pt", "rb") as known,
    ):
        weights_only = (None, torch_private.weights_only_pickle_module())
        load = getattr(torch.serialization, torch_private.LOAD_ZIP)
        assert_same(load(hooks_files.PendingReader(known), *weights_only, encoding="utf-8", **said), STATE)
        with pytest.raises(pickle.UnpicklingError):
            load(hooks_files.PendingReader(unknown), *weights_only, encoding="utf-8", **said)
    assert (served(hooks, "torch.load"), reasons(hooks)) == (1, [])


class Unknown:
    """An object that torch's rules do not allow."""


def test_a_link_is_loaded_and_stays_a_link(tmp_path):
    torch.save(STATE, tmp_path / "x.pt")
    (tmp_path / "link.pt").symlink_to("x.pt")
    with gdsdata.torch_hooks() as hooks:
        assert_same(torch.load(tmp_path / "link.pt"), STATE)
        torch.save([1], tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink() and torch.load(tmp_path / "x.pt") == [1]
    assert served(hooks, "torch.load") == 1 and reasons(hooks) == [("torch.save", "the path is a symbolic link")]


# --- file objects -----------------------------------------------------------------------------------------------------


def opened_by_fsspec(path: Path, mode: str):
    return pytest.importorskip("fsspec").filesystem("file").open(path, mode)


def opened_for_both(path: Path):
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT), "r+b")


def named_temporary(path: Path, mode: str):
    return tempfile._TemporaryFileWrapper(opened_for_both(path), str(path), delete=False)


WRITERS = {
    "open": open,
    "unbuffered": io.FileIO,
    "r+b": lambda path, mode: opened_for_both(path),
    "fsspec": opened_by_fsspec,
    "tempfile": named_temporary,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_object_of_an_empty_file_is_written_in_place(tmp_path, kind):
    path = tmp_path / "x.pt"
    with gdsdata.torch_hooks() as hooks, WRITERS[kind](path, "wb") as file:
        inode = os.fstat(file.fileno()).st_ino
        torch.save(STATE, file)
        assert file.tell() == os.path.getsize(path)
        file.write(b"behind")
    assert (served(hooks, "torch.save"), reasons(hooks)) == (1, [])
    assert path.read_bytes().endswith(b"behind") and path.stat().st_ino == inode
    os.truncate(path, path.stat().st_size - 6)
    assert_same(torch.load(path), STATE)


@pytest.mark.parametrize("open_it", [open, opened_by_fsspec, io.FileIO])
def test_a_file_object_is_loaded_from(tmp_path, open_it):
    torch.save(STATE, tmp_path / "x.pt")
    with gdsdata.torch_hooks() as hooks, open_it(tmp_path / "x.pt", "rb") as file:
        assert_same(torch.load(file), STATE)
    assert (served(hooks, "torch.load"), reasons(hooks)) == (1, [])


def test_file_objects_that_gdsdata_cannot_serve_are_torchs(tmp_path):
    torch.save(STATE, tmp_path / "x.pt")
    content = (tmp_path / "x.pt").read_bytes()

    class Counting(io.FileIO):
        pass

    with gdsdata.torch_hooks() as hooks:
        with open(tmp_path / "begun.pt", "wb") as file:
            file.write(b"before")
            torch.save(STATE, file)
        assert (tmp_path / "begun.pt").read_bytes().startswith(b"beforePK")
        with open(tmp_path / "appended.pt", "ab") as file:
            torch.save(STATE, file)
        (tmp_path / "longer.pt").write_bytes(bytes(100_000))
        with open(tmp_path / "longer.pt", "r+b") as file:
            torch.save([1], file)
        assert (tmp_path / "longer.pt").stat().st_size == 100_000
        with Counting(tmp_path / "counted.pt", "w") as file:
            torch.save(STATE, file)
        torch.save(STATE, buffer := io.BytesIO())
        (tmp_path / "inner.pt").write_bytes(b"before" + content)
        with open(tmp_path / "inner.pt", "rb") as file:
            file.seek(6)
            assert_same(torch.load(file), STATE)
        (tmp_path / "gone.pt").write_bytes(content)
        with open(tmp_path / "gone.pt", "rb") as file:
            os.unlink(tmp_path / "gone.pt")
            assert_same(torch.load(file), STATE)
        assert_same(torch.load(buffer, weights_only=True) if buffer.seek(0) == 0 else None, STATE)
    assert hooks.report().served == {}
    assert sorted(reasons(hooks)) == [
        ("torch.load", IN_MEMORY),
        ("torch.load", "the file cannot be opened by its name again"),
        ("torch.load", "the file object is not at the file's beginning"),
        ("torch.save", "a file object of type Counting"),
        ("torch.save", IN_MEMORY),
        ("torch.save", "the file object is not at the file's beginning"),
        ("torch.save", "the file object is not open for writing, or it appends"),
        ("torch.save", "the file object's file is not empty"),
    ]


def test_a_save_to_a_file_object_that_fails_leaves_the_file_empty(tmp_path, monkeypatch):
    def full(*_, **__):
        raise IoError(28, "no space", "x.pt", 0, 0)

    monkeypatch.setattr("gdsdata.checkpoint.file_writer.FileWriter.commit", full)
    with gdsdata.torch_hooks(), open(tmp_path / "x.pt", "wb") as file:
        with pytest.raises(IoError):
            torch.save(STATE, file)
        assert file.tell() == 0 and os.path.getsize(tmp_path / "x.pt") == 0
        with pytest.raises(AttributeError):
            torch.save(lambda: None, file)
        assert os.path.getsize(tmp_path / "x.pt") == 0


# --- functions as map_location ----------------------------------------------------------------------------------------


def recording(calls: list, result):
    def place(storage, location):
        octets = torch.empty(0, dtype=torch.uint8).set_(storage)
        calls.append((type(storage), storage.nbytes(), bits(octets), location))
        return result(storage, location)

    return place


RESULTS = {
    "the storage": lambda storage, location: storage,
    "none": lambda storage, location: None,
    "a copy": lambda storage, location: storage.clone(),
    "meta": lambda storage, location: torch.UntypedStorage(storage.nbytes(), device="meta"),
}


def asks_again(path: Path) -> bool:
    """Return whether torch asks for each tensor anew, if the function returns no memory (2.9)."""
    tensor = torch.ones(3)
    torch.save([tensor, tensor[1:]], path)
    calls = []
    torch.load(path, recording(calls, RESULTS["meta"]))
    return len(calls) == 2


@pytest.mark.parametrize("kind", RESULTS)
@pytest.mark.parametrize("make", [trained, awkward, lambda: torch.arange(5)])
def test_a_function_as_map_location_gets_what_torch_gives_it(tmp_path, kind, make, monkeypatch):
    monkeypatch.setattr("gdsdata.checkpoint.torch_zip.mapped_storages._AHEAD_BYTES", 10_000)
    state = make()
    if isinstance(state, dict):
        state.pop("storage", None)  # two storages are never equal
        if kind == "meta":
            state.pop("quantized", None)  # which torch does not make there
    torch.save(state, tmp_path / "x.pt")
    expected_calls, calls = [], []
    function = RESULTS[kind]
    expected = torch.load(tmp_path / "x.pt", recording(expected_calls, function), weights_only=False)
    with gdsdata.torch_hooks() as hooks:
        found = torch.load(tmp_path / "x.pt", recording(calls, function), weights_only=False)
    assert (served(hooks, "torch.load"), reasons(hooks)) == (1, [])
    if kind == "meta" and asks_again(tmp_path / "two.pt"):
        calls, expected_calls = list(dict.fromkeys(calls)), list(dict.fromkeys(expected_calls))
    assert calls == expected_calls
    if kind != "meta":
        assert_same(found, expected)


@pytest.mark.parametrize("result", [lambda storage: 5, lambda storage: 1 / 0, lambda storage: torch.ones(3)])
@pytest.mark.parametrize("extra", [None, set()])
def test_a_wrong_map_location_function_ends_in_torchs_error(tmp_path, result, extra):
    torch.save([torch.arange(5), extra], tmp_path / "x.pt")
    errors = []
    for hooked in (False, True):
        with gdsdata.torch_hooks() if hooked else tempfile.TemporaryFile(), pytest.raises(Exception) as error:
            torch.load(tmp_path / "x.pt", lambda storage, location: result(storage))
        errors.append((type(error.value), str(error.value)))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("make", [lambda: torch.from_numpy(np.zeros(3)).untyped_storage(), lambda: 1 / 0])
def test_a_map_location_function_is_never_called_twice_for_a_storage(tmp_path, make):
    torch.save([torch.arange(3), torch.arange(5), torch.arange(7)], tmp_path / "x.pt")
    calls = []

    def function(storage, location):
        calls[-1].append(storage.nbytes())
        return make() if storage.nbytes() == 40 else storage

    errors = []
    for hooked in (False, True):
        calls.append([])
        with gdsdata.torch_hooks() if hooked else tempfile.TemporaryFile(), pytest.raises(Exception) as error:
            torch.load(tmp_path / "x.pt", function)
        errors.append((type(error.value), str(error.value).splitlines()[0]))
    assert calls == [[24, 40], [24, 40]] and errors[0] == errors[1]


def test_storages_are_read_ahead_of_a_map_location_function_within_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_storages, "_AHEAD_BYTES", 10_000)
    made, ahead = [], []
    make = mapped_storages.new_storage
    monkeypatch.setattr(mapped_storages, "new_storage", lambda size, device: made.append(size) or make(size, device))
    sizes = [4000, 4000, 4000, 24_000, 4000]
    torch.save([torch.zeros(size, dtype=torch.uint8) for size in sizes], tmp_path / "x.pt")
    with gdsdata.torch_hooks():
        torch.load(tmp_path / "x.pt", lambda storage, location: ahead.append(sum(made[len(ahead) :])) or storage)
    assert ahead == [8000, 4000, 4000, 24_000, 4000]


@pytest.mark.gpu
def test_a_function_as_map_location_may_move_storages_to_the_gpu(tmp_path):
    state = {"a": torch.arange(5000, device="cuda"), "b": torch.arange(3)}
    with gdsdata.torch_hooks() as hooks:
        with open(tmp_path / "x.pt", "wb") as file:
            torch.save(state, file)
        found = torch.load(tmp_path / "x.pt", lambda storage, location: storage.cuda())
        default = torch.load(tmp_path / "x.pt", lambda storage, location: None)
    assert found["a"].is_cuda and found["b"].is_cuda and torch.equal(found["b"].cpu(), state["b"])
    assert torch.equal(found["a"], state["a"]) and torch.equal(default["a"], state["a"]) and default["b"].is_cpu
    assert (served(hooks, "torch.save"), served(hooks, "torch.load"), reasons(hooks)) == (1, 2, [])


def test_tensors_share_a_mapped_storage(tmp_path):
    base = torch.arange(10.0)
    torch.save([base, base[2:5], torch.nn.Parameter(base)], tmp_path / "x.pt")
    with gdsdata.torch_hooks():
        found = torch.load(tmp_path / "x.pt", lambda storage, location: storage)
    found[0][3] = 77.0
    assert found[1][1] == 77.0 and found[2][3] == 77.0 and found[2].requires_grad
    assert bits(found[0]) != bits(base)


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------

EARLY_WRITER, EARLY_READER = dcp.FileSystemWriter, dcp.filesystem.FileSystemReader


def test_storage_classes_by_any_name_are_gdsdatas_and_still_torchs(tmp_path):
    state = {"a": torch.arange(100), "b": 5}
    found = {"a": torch.zeros(100, dtype=torch.int64), "b": 0}
    with gdsdata.torch_hooks() as hooks:
        writer = EARLY_WRITER(tmp_path / "x", sync_files=False, thread_count=2)
        assert isinstance(writer, dcp.FileSystemWriter) and isinstance(writer, GDSStorageWriter)
        assert writer.thread_count == 2
        dcp.save(state, storage_writer=writer)
        reader = EARLY_READER(str(tmp_path / "x"))
        assert isinstance(reader, EARLY_READER) and isinstance(reader, GDSStorageReader)
        dcp.load(found, storage_reader=reader)
    assert_same(found, state)
    assert (served(hooks, "dcp.save"), served(hooks, "dcp.load"), reasons(hooks)) == (1, 1, [])
    assert hooks.report().served["dcp.load"].bytes > 800
    assert type(EARLY_WRITER(tmp_path / "x")) is EARLY_WRITER


def test_storage_classes_with_arguments_that_gdsdata_does_not_serve_are_torchs(tmp_path):
    class Mine(dcp.FileSystemWriter):
        pass

    with gdsdata.torch_hooks() as hooks:
        assert type(dcp.FileSystemWriter(tmp_path, False)) is EARLY_WRITER
        registry = dcp.filesystem.ExtensionRegistry()
        assert type(dcp.FileSystemReader(tmp_path, _extension_registry=registry)) is EARLY_READER
        assert type(Mine(tmp_path)) is Mine
        with pytest.raises(TypeError):
            dcp.FileSystemWriter(tmp_path, nonsense=1)
        assert type(gdsdata.GDSStorageWriter(tmp_path)) is GDSStorageWriter
    (reader, with_registry), *writers = reasons(hooks)
    assert reader == "dcp.FileSystemReader" and with_registry == "_extension_registry=..."
    assert writers == [
        ("dcp.FileSystemWriter", "a class of its own: Mine"),
        ("dcp.FileSystemWriter", "single_file_per_rank=False"),
    ]


@pytest.fixture
def group():
    """Make a group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_save_in_the_background_is_gdsdatas_if_it_began_under_hooks(tmp_path):
    state = {"a": torch.arange(100)}
    go_on = threading.Event()

    class Slow(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            assert go_on.wait(30)
            return super().create_local_plan()

    with gdsdata.torch_hooks():
        future = dcp.async_save(state, checkpoint_id=str(tmp_path / "x"), planner=Slow())
    go_on.set()
    assert is_by_gdsdata(future.result())


def is_by_gdsdata(metadata) -> bool:
    """Return whether gdsdata wrote all tensors of a checkpoint. It notes their places."""
    kinds = metadata.state_dict_metadata
    infos = [info for at, info in metadata.storage_data.items() if isinstance(kinds[at.fqn], TensorStorageMetadata)]
    return infos != [] and all(hasattr(info, "gdsdata_place") for info in infos)


@pytest.fixture
def save_process():
    """End the process that saves in the background, which torch keeps."""
    yield
    _async_process_executor._CHECKPOINT_PROCESS._save_process.kill()
    _async_process_executor._CHECKPOINT_PROCESS = None


@pytest.mark.usefixtures("group", "save_process")
def test_a_save_in_a_process_of_its_own_is_gdsdatas(tmp_path):
    def save(name: str):
        return dcp.async_save(
            {"a": torch.arange(100)},
            checkpoint_id=str(tmp_path / name),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )

    save("before").result()
    assert not is_by_gdsdata(dcp.FileSystemReader(tmp_path / "before").read_metadata())
    with gdsdata.torch_hooks() as hooks:
        future = save("within")
        assert is_by_gdsdata(future.result())
        future.exception()
        assert is_by_gdsdata(dcp.FileSystemReader(tmp_path / "within").read_metadata())
    assert served(hooks, "dcp.async_save (process)") == 1
    found = {"a": torch.zeros(100, dtype=torch.int64)}
    dcp.load(found, checkpoint_id=str(tmp_path / "within"))
    assert torch.equal(found["a"], torch.arange(100))


def _save_in_processes(rank, folder):
    def state_of(seed):
        model, optimizer = sharded(seed, init_device_mesh("cpu", (2,)))
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "seed": seed}

    def save(name):
        kind = AsyncCheckpointerType.PROCESS
        return dcp.async_save(state, checkpoint_id=str(folder / name), async_checkpointer_type=kind).result()

    def whole(state):
        return [one.full_tensor() for one in state["model"].values()]

    state, found = state_of(5), state_of(6)
    with gdsdata.torch_hooks() as hooks:
        try:
            of_saves = [is_by_gdsdata(save(name)) for name in ("a", "b")]
        finally:
            _async_process_executor._CHECKPOINT_PROCESS._save_process.kill()
        dcp.load(found, checkpoint_id=str(folder / "b"))
    assert eventually(lambda: served(hooks, "dcp.async_save (process)") == 2)  # counted after it ends
    is_same = found["seed"] == 5 and all(map(torch.equal, whole(found), whole(state)))
    return of_saves, is_same, hooks.report()


def test_two_ranks_save_in_processes_of_their_own_by_gdsdata(tmp_path):
    ranks = on_ranks(2, _save_in_processes, tmp_path)
    size_bytes = sum(path.stat().st_size for path in tmp_path.glob("[ab]/*.distcp"))
    for of_saves, is_same, report in ranks:
        assert of_saves == [True, True] and is_same
        saved, loaded = report.served["dcp.async_save (process)"], report.served["dcp.load"]
        assert (saved.calls, saved.bytes, loaded.calls) == (2, size_bytes, 1)  # the bytes of both ranks
        assert loaded.bytes < 0.3 * size_bytes  # this rank's half of one of the two
        assert len(report.served) == 2 and report.left_to_torch == ()


def test_a_writer_that_stays_torchs_in_a_save_process_is_reported_with_the_reason_for_it(tmp_path, monkeypatch):
    class Mine(dcp.FileSystemWriter):
        pass

    class Executor:
        def execute_save(self, staged, **named):
            return concurrent.futures.Future()

    monkeypatch.setattr(torch_private, "saves_in_process", lambda executor: True)
    save = hooks_dcp._with_our_writer(Executor, Executor.execute_save)
    early = dcp.FileSystemWriter(tmp_path)
    with gdsdata.torch_hooks() as hooks:
        for writer in (
            early,
            Mine(tmp_path),
            dcp.FileSystemWriter(tmp_path, False),
            gdsdata.GDSStorageWriter(tmp_path),
        ):
            save(Executor(), {}, storage_writer=writer)
    assert [reason for call, reason in reasons(hooks) if call == "dcp.async_save (process)"] == [
        "a class of its own: Mine",
        "its storage writer was made before the hooks",
        "single_file_per_rank=False",
    ]


# --- frameworks -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("group")
def test_accelerates_sharded_checkpoints_are_gdsdatas(tmp_path, monkeypatch):
    fsdp_utils = pytest.importorskip("accelerate.utils.fsdp_utils")
    plugin = SimpleNamespace(state_dict_type=StateDictType.SHARDED_STATE_DICT, fsdp_version=2, state_dict_config=None)
    accelerator = SimpleNamespace(
        num_processes=1, process_index=0, is_main_process=True, wait_for_everyone=lambda: None
    )
    monkeypatch.setattr(fsdp_utils.logger, "info", lambda *_: None)  # it needs an Accelerator
    model, other = torch.nn.Linear(20, 30), torch.nn.Linear(20, 30)
    with gdsdata.torch_hooks() as hooks:
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, str(tmp_path))
        fsdp_utils.load_fsdp_model(plugin, accelerator, other, str(tmp_path))
    assert torch.equal(model.weight, other.weight)
    assert (served(hooks, "dcp.save"), served(hooks, "dcp.load"), reasons(hooks)) == (1, 1, [])


def test_lightnings_loads_are_gdsdatas_and_its_saves_through_memory_are_reported(tmp_path):
    cloud_io = pytest.importorskip("lightning.fabric.utilities.cloud_io")
    with gdsdata.torch_hooks() as hooks:
        cloud_io._atomic_save(STATE, tmp_path / "x.ckpt")
        found = cloud_io._load(tmp_path / "x.ckpt", map_location=lambda storage, location: storage)
    assert_same(found, STATE)
    assert served(hooks, "torch.load") == 1
    assert reasons(hooks) == [("torch.save", IN_MEMORY)]


def test_adapters_of_peft_and_models_of_transformers_in_torchs_format_are_gdsdatas(tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    with gdsdata.torch_hooks() as hooks:
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        config.save_pretrained(tmp_path)
        found = transformers.LlamaForCausalLM.from_pretrained(tmp_path, use_safetensors=False)
        assert all(torch.equal(found.state_dict()[name], one) for name, one in model.state_dict().items())
        adapted = peft.get_peft_model(found, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        adapted.save_pretrained(tmp_path / "adapter", safe_serialization=False)
        peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    assert served(hooks, "torch.save") == 2
    assert served(hooks, "torch.load") >= 1
    assert ("torch.load", "mmap=True") in reasons(hooks), "transformers maps files"


# --- the report -------------------------------------------------------------------------------------------------------


def test_safetensors_is_served_too_if_asked_for():
    stock = safetensors.torch.save_file
    with gdsdata.torch_hooks():
        assert safetensors.torch.save_file is stock
    with gdsdata.torch_hooks(safetensors=True), pytest.raises(KeyError):
        assert safetensors.torch.save_file.__wrapped__ is gdsdata.safetensors.save_file
        raise KeyError
    assert safetensors.torch.save_file is stock
    assert not hooks.are_installed()


def test_the_report_has_the_calls_of_safetensors_and_all_that_an_open_file_reads(tmp_path):
    path, tensors = tmp_path / "x.safetensors", {"a": torch.arange(100.0), "b": torch.ones(3, 2)}
    with gdsdata.torch_hooks() as outer, gdsdata.torch_hooks(safetensors=True) as hooks:
        safetensors.torch.save_file(tensors, path)
        safetensors.torch.load_file(path)
        with safetensors.safe_open(path, framework="pt") as file:
            file.get_tensor("a")
            file.get_slice("b")[:2]
            file.get_tensors()
        gdsdata.safetensors.load_file(path)  # is no call of the package
        with pytest.raises(FileNotFoundError):
            safetensors.torch.load_file(tmp_path / "none.safetensors")
    report = hooks.report()
    assert {call: (one.calls, one.bytes) for call, one in report.served.items()} == {
        "safetensors.save_file": (1, 424),
        "safetensors.load_file": (1, 424),
        "safetensors.safe_open": (1, 400 + 16 + 424),
    }
    assert all(one.seconds > 0 for one in report.served.values())
    assert report.left_to_torch == () and outer.report() == report


REFUSED = {
    "a tensor that is not contiguous": {"a": torch.ones(3, 2).t()},
    "tensors that share memory": dict.fromkeys("ab", torch.ones(3)),
    "a tensor without memory of its own (meta, sparse)": {"a": torch.eye(3).to_sparse()},
    "a tensor of torch.complex128": {"a": torch.ones(3, dtype=torch.complex128)},
    "its tensors are in a list, not a dict": [torch.ones(3)],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_the_report_says_why_a_save_was_left_to_safetensors(tmp_path, reason):
    path = str(tmp_path / "x.safetensors")
    with gdsdata.torch_hooks(safetensors=True) as hooks:
        with pytest.raises((ValueError, RuntimeError, TypeError, KeyError)):
            safetensors.torch.save_file(REFUSED[reason], path)
        assert hooks.report().served == {}
    (left,) = hooks.report().left_to_torch
    assert (left.call, left.calls, left.reason, left.example) == ("safetensors.save_file", 1, reason, path)
    assert "left to torch, safetensors" in str(hooks.report())


def test_the_report_says_why_a_file_was_opened_by_safetensors(tmp_path):
    path = str(tmp_path / "x.safetensors")
    safetensors.torch.save_file({"a": torch.ones(3)}, path)
    with gdsdata.torch_hooks(safetensors=True) as hooks:
        with safetensors.safe_open(path, framework="np") as file:
            file.get_tensor("a")
        with pytest.raises(safetensors.SafetensorError, match="meta"):
            safetensors.torch.load_file(path, device="meta")
        gdsdata.safetensors.safe_open(path, framework="np")  # is no call of the package
    assert hooks.report().served == {}
    assert reasons(hooks) == [
        ("safetensors.load_file", "framework='pt', device='meta', backend='mmap'"),
        ("safetensors.safe_open", "framework='np', device='cpu', backend='mmap'"),
    ]


def test_a_save_over_a_file_that_cannot_be_replaced_is_left_to_safetensors(tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"

    def refuse(*_):
        raise NotReplaceable(1, f"no new file can replace {path}", str(path))

    monkeypatch.setattr(files, "write", refuse)
    with gdsdata.torch_hooks(safetensors=True) as hooks, pytest.warns(RuntimeWarning, match="safetensors writes it"):
        safetensors.torch.save_file({"a": torch.ones(3)}, path)
    assert reasons(hooks) == [("safetensors.save_file", "no new file can replace it")]


def test_hooks_that_could_not_be_installed_are_not_said_to_be(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(hooks, "_replacements", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gdsdata.install_torch_hooks(safetensors=True)
    assert not hooks.are_installed() and safetensors.torch.save_file.__module__ == "safetensors.torch"
    with gdsdata.torch_hooks() as installed:
        torch.save(STATE, tmp_path / "x.pt")
    assert served(installed, "torch.save") == 1


def test_the_report_says_what_went_through_and_what_did_not_and_why(tmp_path):
    with gdsdata.torch_hooks() as hooks:
        assert str(hooks.report()).startswith("gdsdata: no call")
        torch.save(STATE, tmp_path / "x.pt")
        for _ in range(2):
            torch.load(tmp_path / "x.pt")
        torch.load(tmp_path / "x.pt", mmap=True)
        with gdsdata.torch_hooks() as inner:
            pass
    torch.save(STATE, tmp_path / "later.pt")
    report = hooks.report()
    size_bytes = (tmp_path / "x.pt").stat().st_size
    assert {call: (one.calls, one.bytes) for call, one in report.served.items()} == {
        "torch.save": (1, size_bytes),
        "torch.load": (2, 2 * size_bytes),
    }
    assert all(one.seconds > 0 for one in report.served.values())
    (left,) = report.left_to_torch
    assert (left.call, left.calls, left.reason) == ("torch.load", 1, "mmap=True")
    heading, load, save, blank, heading_of_left, last = str(report).splitlines()
    assert heading.split() == ["gdsdata", "served", "calls", "GB", "s", "GB/s"] and blank == ""
    assert load.split()[:2] == ["torch.load", "2"] and save.split()[:2] == ["torch.save", "1"]
    assert heading_of_left.split() == ["left", "to", "torch", "calls", "because", "example"]
    assert last.split()[:3] == ["torch.load", "1", "mmap=True"] and last.endswith(".pt")
    assert inner.report().served == {}


def test_reasons_are_counted_apart_only_as_long_as_they_are_few(monkeypatch):
    counts = hooks_report.Counts()
    begin = counts.snapshot()
    for number in range(hooks_report._MOST_REASONS + 10):
        counts.left("torch.load", f"the file: {number}", "x.pt")
    left = counts.snapshot().since(begin).left_to_torch
    assert len(left) == hooks_report._MOST_REASONS + 1
    assert [one.calls for one in left if one.reason == "another reason"] == [10]


def test_calls_of_many_threads_are_all_counted(tmp_path):
    def use(number: int) -> None:
        for _ in range(10):
            torch.save([number], tmp_path / f"{number}.pt")
            torch.load(io.BytesIO(torchs.getvalue()))

    torch.save([1], torchs := io.BytesIO())
    with gdsdata.torch_hooks() as hooks:
        threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert served(hooks, "torch.save") == 40
    assert [(one.call, one.calls) for one in hooks.report().left_to_torch] == [("torch.load", 40)]


def test_two_dots_behind_a_link_lead_where_the_system_goes(tmp_path, monkeypatch):
    (tmp_path / "there" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("there/run")
    monkeypatch.chdir(tmp_path)
    with gdsdata.torch_hooks() as hooks:
        torch.save([1], "link/../x.pt")
    assert served(hooks, "torch.save") == 1
    assert torch.load("there/x.pt") == [1] and not os.path.exists("x.pt")
    with gdsdata.AsyncCheckpointer("link/../new/run") as checkpointer:
        checkpointer.save(1, {"a": torch.ones(3)}).result()
    assert os.path.isdir("there/new/run/step-1") and not os.path.exists("new")


@pytest.mark.parametrize("owner, name", [(threading.Thread, "start"), (hooks_report.Served, "plus")])
def test_a_signal_handler_may_save_and_load_while_it_interrupts_a_save(tmp_path, monkeypatch, owner, name):
    state = {"a": torch.arange(1000)}
    its, handled = getattr(owner, name), []

    def interrupted(*arguments):
        if not handled:
            handled.append(name)
            torch.save(state, tmp_path / "handler.pt")
            handled.append(torch.load(tmp_path / "handler.pt"))
        return its(*arguments)

    def save():
        with gdsdata.torch_hooks():
            monkeypatch.setattr(owner, name, interrupted)
            torch.save(state, tmp_path / "x.pt")

    saving = threading.Thread(target=save, daemon=True)
    saving.start()
    saving.join(timeout=20)
    assert not saving.is_alive(), "the save waits for itself"
    assert_same([handled[1], torch.load(tmp_path / "x.pt")], [state, state])


def test_a_signal_handler_may_use_the_engine_that_it_interrupts_the_making_of(monkeypatch):
    options, found = gdsdata.EngineOptions(workers=3, segment_bytes=3 << 20), []

    def interrupted(*arguments):
        monkeypatch.setattr(engine, "staging_for", its)
        found.append(engine.shared_engine(options, torch.device("cpu")))
        return its(*arguments)

    its = engine.staging_for
    monkeypatch.setattr(engine, "staging_for", interrupted)
    making = threading.Thread(
        target=lambda: found.append(engine.shared_engine(options, torch.device("cpu"))), daemon=True
    )
    making.start()
    making.join(timeout=20)
    assert len(found) == 2 and found[0] is found[1]


# --- equality with torch ----------------------------------------------------------------------------------------------


def save_to(place: str, state, path: Path) -> None:
    if place == "name":
        return torch.save(state, path)
    with open(path, "wb") as file:
        return torch.save(state, file)


def load_from(place: str, path: Path, map_location):
    if place == "name":
        return torch.load(path, map_location)
    with open(path, "rb") as file:
        return torch.load(file, map_location)


@given(nests, st.sampled_from(["name", "file"]), st.sampled_from([None, "cpu", lambda storage, location: storage]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_drawn_objects_are_the_same_in_both_directions(tmp_path, state, place, map_location):
    save_to(place, state, tmp_path / "torchs.pt")
    expected = torch.load(tmp_path / "torchs.pt")
    with gdsdata.torch_hooks() as hooks:
        save_to(place, state, tmp_path / "ours.pt")
        assert_same(load_from(place, tmp_path / "torchs.pt", map_location), expected)
        assert_same(load_from(place, tmp_path / "ours.pt", map_location), expected)
    assert_same(torch.load(tmp_path / "ours.pt"), expected)
    assert (served(hooks, "torch.save"), served(hooks, "torch.load")) == (1, 2)
