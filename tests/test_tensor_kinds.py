"""Every kind of tensor is saved and loaded as torch does it, or refused as a whole."""

import contextlib
import io
import re
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.attention.bias
from helpers import run_script
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.masked import masked_tensor
from torch.testing._internal.common_subclass import DiagTensorBelow, NonWrapperTensor
from torch.testing._internal.custom_tensor import ConstantExtraMetadataTensor, CustomTensorPlainOut
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.subclasses import WrapperSubclass
from torch.testing._internal.two_tensor import TwoTensor

import gdsdata
import gdsdata.safetensors
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.torch_zip import archive_reader
from gdsdata.checkpoint.torch_zip.archive import open_archive
from gdsdata.errors import CorruptData

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # many kinds are prototypes
    pytest.mark.usefixtures("one_rank"),
]

torch_save, torch_load = torch.save, torch.load


@pytest.fixture(scope="module")
def one_rank():
    """Start a process group, which even a single DTensor needs."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def values(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + np.prod(shape)).reshape(shape)


class OwnParameter(torch.nn.Parameter):
    pass


class OwnTensor(torch.Tensor):
    pass


class Coded(torch.Tensor):
    """Codes and a scale. As the states of torchao's optimizers, it has no clone()."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool = True) -> "Coded":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool = True) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __repr__(self) -> str:
        return f"Coded({self.codes!r}, {self.scale!r}, {self.signed})"

    def __tensor_flatten__(self) -> tuple[list[str], bool]:
        return ["codes", "scale"], self.signed

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], signed: bool, size: Any, stride: Any) -> "Coded":
        return Coded(inner["codes"], inner["scale"], signed)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        one = arguments[0]
        if function is torch.ops.aten.copy_.default and type(arguments[1]) is Coded:
            if one.signed != arguments[1].signed:
                raise ValueError("one has signs")
            one.codes.copy_(arguments[1].codes)
            one.scale.copy_(arguments[1].scale)
            return one
        if function in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default):
            return Coded(one.codes, one.scale, one.signed)
        if function is torch.ops.aten.view.default:
            return Coded(one.codes.view(*arguments[1:]), one.scale, one.signed)
        if function is torch.ops.aten.is_pinned.default:
            return False
        raise NotImplementedError(f"Coded has no {function}")


class WithoutStorage:
    """Pickled as a tensor of a device without storages (XLA and the like)."""

    def __init__(self, rebuilt_by: str, data: Any) -> None:
        self._call = getattr(torch._utils, rebuilt_by)
        self._arguments = (data, torch.float32, "cpu", False)

    def __reduce__(self):
        return self._call, self._arguments


def with_attributes() -> torch.Tensor:
    tensor = values(3)
    tensor.note, tensor.other = "x", values(2)
    return tensor


def sharded(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, dist.init_device_mesh("cpu", (1,)), [Shard(0)])


def quantized(scale: float = 0.1) -> torch.Tensor:
    return torch.quantize_per_tensor(values(20), scale, 3, torch.quint8)


def quantized_by_channel(scale: float = 0.1) -> torch.Tensor:
    scales, zeros = torch.tensor([scale, 0.2]), torch.tensor([0, 1])
    return torch.quantize_per_channel(values(2, 3), scales, zeros, 0, torch.qint8)


def coded(factor: int = 1, signed: bool = True) -> torch.Tensor:
    return Coded(torch.arange(6, dtype=torch.uint8).reshape(3, 2) * factor, torch.tensor([0.5 * factor]), signed)


def masked(factor: float = 1.0) -> torch.Tensor:
    return masked_tensor(values(4) * factor, torch.tensor([True, False, True, True]))


PLAIN: dict[str, Callable[[], Any]] = {
    "tensor": lambda: values(3, 2),
    "parameter": lambda: torch.nn.Parameter(values(3)),
    "conjugate": lambda: torch.view_as_complex(values(4, 2)).conj(),
    "negative": lambda: torch.view_as_complex(values(4, 2)).conj().imag,
    "complex32": lambda: torch.zeros(4, dtype=torch.complex32),
}
OTHERS: dict[str, Callable[[], Any]] = {
    "own parameter": lambda: OwnParameter(values(3)),
    "own tensor": lambda: values(3).as_subclass(OwnTensor),
    "attributes": with_attributes,
    "buffer": lambda: torch.nn.Buffer(values(3)),
    "coo": lambda: values(3, 3).to_sparse(),
    "quantized": quantized,
    "quantized by channel": quantized_by_channel,
    "meta": lambda: values(3).to("meta"),
    "two": lambda: TwoTensor(values(3, 2), values(3, 2) * 2),
    "two in two": lambda: TwoTensor(TwoTensor(values(3), values(3) * 2), values(3) * 3),
    "parameter of two": lambda: torch.nn.Parameter(TwoTensor(values(3), values(3) * 2)),
    "masked": masked,
    "dtensor": lambda: sharded(values(4, 2)),
    "replicated": lambda: distribute_tensor(values(4), dist.init_device_mesh("cpu", (1,)), [Replicate()]),
    "parameter of dtensor": lambda: torch.nn.Parameter(sharded(values(4, 2))),
    "dtensor of two": lambda: sharded(TwoTensor(values(3), values(3) * 2)),
    "wrapper": lambda: WrapperSubclass(values(3)),
    "metadata": lambda: ConstantExtraMetadataTensor(values(3)),
    "plain out": lambda: CustomTensorPlainOut(values(3), values(3) * 2),
    "logging": lambda: LoggingTensor(values(3)),
    "diagonal": lambda: DiagTensorBelow(values(3)),
    "not a wrapper": lambda: NonWrapperTensor(values(3)),
    "coded": coded,
    "dtensor of coded": lambda: sharded(coded()),
    "causal bias": lambda: torch.nn.attention.bias.causal_lower_right(3, 4),
    "collective": lambda: torch.distributed._functional_collectives.AsyncCollectiveTensor(values(3)),
}
# These never, or not always, take a copy of another one.
REPLACED: dict[str, Callable[[], Any]] = {
    "csr": lambda: values(3, 3).to_sparse_csr(),
    "csc": lambda: values(3, 3).to_sparse_csc(),
    "bsr": lambda: values(4, 4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([values(2, 3), values(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([values(2, 3), values(4, 3)], layout=torch.jagged),
    "uninitialized parameter": torch.nn.UninitializedParameter,
    "uninitialized buffer": torch.nn.UninitializedBuffer,
}
# These are no tensors while they are saved, or no leaves of a state.
LOADED: dict[str, Callable[[], Any]] = {
    "from numpy": lambda: WithoutStorage("_rebuild_device_tensor_from_numpy", np.arange(4.0)),
    "from cpu": lambda: WithoutStorage("_rebuild_device_tensor_from_cpu_tensor", values(4)),
    "xla": lambda: WithoutStorage("_rebuild_xla_tensor", np.arange(4.0)),
    "storage": lambda: values(3).untyped_storage(),
    "module": lambda: torch.nn.Linear(2, 2),
    "in a set of tuples": lambda: {(1, "a"), (2, "b")},
}
KINDS = PLAIN | OTHERS | REPLACED | LOADED


def state_of(kind: str) -> dict[str, Any]:
    """Put one of this kind between plain tensors, whose storages come before and after it."""
    return {"before": values(2), "it": KINDS[kind](), "behind": values(5000)}


def form(value: Any) -> list[tuple[str, bytes]]:
    """Return torch's file of the value: its type, strides, device, bytes and shared memory."""
    buffer = io.BytesIO()
    torch_save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        names = [name for name in archive.namelist() if "data.pkl" in name or "/data/" in name]
        return [(name, archive.read(name)) for name in names]


def attempt(call: Callable[[], Any]) -> tuple[Any, type[BaseException] | None]:
    try:
        return form(call()), None
    except (Exception, CheckpointException) as error:
        return None, type(error)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_torch_is_loaded_as_torch_loads_it(tmp_path, kind, weights_only):
    path = tmp_path / "x.pt"
    torch_save(state_of(kind), path)

    def by_hooks(**arguments: Any) -> Any:
        with gdsdata.torch_hooks():
            return torch.load(path, weights_only=weights_only, **arguments)

    for location in (None, "cpu", torch.device("cpu"), {"cuda:0": "cpu"}):
        expected = attempt(lambda at=location: torch_load(path, map_location=at, weights_only=weights_only))
        assert attempt(lambda at=location: by_hooks(map_location=at)) == expected
    expected = attempt(lambda: torch_load(path, map_location="cpu", weights_only=weights_only))
    assert attempt(lambda: gdsdata.load(path, weights_only=weights_only)) == expected
    assert weights_only or expected[1] is None, "torch loads all of them"


@pytest.mark.parametrize("kind", KINDS)
def test_torch_loads_the_same_from_files_of_gdsdata_and_of_torch(tmp_path, kind):
    state = state_of(kind)
    torch_save(state, tmp_path / "torchs.pt")
    gdsdata.save(state, tmp_path / "ours.pt")
    with gdsdata.torch_hooks():
        torch.save(state, tmp_path / "hooks.pt")
    expected = form(torch_load(tmp_path / "torchs.pt", weights_only=False))
    for name in ("ours.pt", "hooks.pt"):
        assert form(torch_load(tmp_path / name, weights_only=False)) == expected


@pytest.mark.parametrize("kind", OTHERS | REPLACED | LOADED)
def test_only_gives_what_a_whole_load_gives(tmp_path, kind):
    torch_save(state_of(kind), tmp_path / "x.pt")
    expected = torch_load(tmp_path / "x.pt", map_location="cpu", weights_only=False)
    del expected["before"], expected["behind"]
    found = gdsdata.load(tmp_path / "x.pt", only=["it", "it.*"], weights_only=False)
    if kind == "own parameter":  # it is unpickled as a parameter, and only= gives a parameter's tensor
        assert torch.equal(found["it"], expected["it"])
    else:
        assert form(found) == form(expected)


# zero_() does not work on these.
EMPTIED = {
    "quantized": lambda: quantized(scale=0.7),
    "quantized by channel": lambda: quantized_by_channel(scale=0.7),
    "masked": lambda: masked(factor=0.0),
    "coded": lambda: coded(factor=0),
    "dtensor of coded": lambda: sharded(coded(factor=0)),
    "diagonal": KINDS["diagonal"],
}


def emptied(kind: str) -> dict[str, Any]:
    """Make a state to load into, with other values if the kind permits them."""
    make = EMPTIED.get(kind, KINDS[kind])
    state = {"before": torch.zeros(2), "it": make(), "behind": torch.zeros(5000)}
    if kind not in EMPTIED | REPLACED:
        with torch.no_grad():
            state["it"].zero_()
    return state


def assert_same_values(found: dict[str, Any], expected: dict[str, Any], kind: str) -> None:
    assert torch.equal(found["before"], expected["before"]) and torch.equal(found["behind"], expected["behind"])
    one, other = found["it"], expected["it"]
    assert type(one) is type(other)
    if isinstance(one, DTensor):
        assert one.placements == other.placements and one.requires_grad == other.requires_grad
        one, other = one.to_local(), other.to_local()
        assert type(one) is type(other)
    if isinstance(one, TwoTensor):
        pairs = [(one.a, other.a), (one.b, other.b)]
        assert all(form(a) == form(b) for a, b in pairs)
    elif kind == "coo":
        assert torch.equal(one.to_dense(), other.to_dense())
    elif kind in ("negative", "not a wrapper", "collective"):  # their memory and attributes stay the target's
        assert one.tolist() == other.tolist()
    else:
        assert form(one) == form(other)


@pytest.mark.parametrize("kind", PLAIN | OTHERS | REPLACED)
def test_loading_into_a_state_fills_it_or_leaves_it_as_it_was(tmp_path, kind):
    state = state_of(kind)
    torch_save(state, tmp_path / "x.pt")
    target = emptied(kind)
    before, its = form(target), target["it"]
    try:
        gdsdata.load(tmp_path / "x.pt", into=target, weights_only=False)
    except ValueError as error:
        expected = "it is on the meta device" if kind == "meta" else "it in .* load it without into="
        assert kind in {"meta"} | REPLACED.keys() and re.match(expected, str(error))
        assert form(target) == before
    else:
        assert_same_values(target, state, kind)
        assert target["it"] is its


@pytest.mark.parametrize("kind", PLAIN | OTHERS | REPLACED)
def test_asynccheckpointer_restores_the_kinds_that_it_saves(tmp_path, kind):
    state, target = state_of(kind), emptied(kind)
    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
        if kind == "meta":
            with pytest.raises(ValueError, match=r"state\.it is on the meta device and has no values to save"):
                checkpointer.save(1, {"state": state})
            return
        checkpointer.save(1, {"state": state}).result()
        assert checkpointer.restore({"state": target}, weights_only=False) == 1
    assert_same_values(target, state, kind)


@pytest.mark.parametrize("kind", PLAIN | OTHERS | REPLACED)
def test_dcp_loads_what_torchs_own_loads_and_refuses_the_rest(tmp_path, kind):
    state = state_of(kind)

    def through(writer: type, reader: type) -> Any:
        folder, target = tmp_path / f"{writer.__name__}-{reader.__name__}", emptied(kind)
        dcp.save(dict(state), storage_writer=writer(folder))
        dcp.load(target, storage_reader=reader(folder))
        return target

    expected = attempt(lambda: through(dcp.FileSystemWriter, dcp.FileSystemReader))
    for writer, reader in [
        (gdsdata.GDSStorageWriter, gdsdata.GDSStorageReader),
        (gdsdata.GDSStorageWriter, dcp.FileSystemReader),
        (dcp.FileSystemWriter, gdsdata.GDSStorageReader),
    ]:
        assert attempt(lambda writer=writer, reader=reader: through(writer, reader)) == expected


@pytest.mark.parametrize("kind", PLAIN | OTHERS | REPLACED)
def test_safetensors_files_hold_plain_tensors_and_refuse_others(tmp_path, kind):
    tensors = {"it": KINDS[kind]()}
    try:
        gdsdata.save(tensors, tmp_path / "ours.safetensors")
    except ValueError as error:
        remedy = "leave it out of the state" if kind == "meta" else "save it to a .pt file"
        assert str(error).startswith("it is ") and remedy in str(error)
        assert kind not in ("tensor", "parameter") and not (tmp_path / "ours.safetensors").exists()
        return
    expected = tensors["it"].detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    save_file({"it": expected}, tmp_path / "torchs.safetensors")
    found = load_file(tmp_path / "ours.safetensors")
    assert form(found) == form(load_file(tmp_path / "torchs.safetensors"))


class Packed:
    """Its bytes are a file of torch's. Unpickling it loads that file."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> bytes:
        buffer = io.BytesIO()
        torch_save(self.tensor, buffer)
        return buffer.getvalue()

    def __setstate__(self, packed: bytes) -> None:
        self.tensor = torch.load(io.BytesIO(packed))


@pytest.mark.parametrize("hooked", [True, False])
def test_objects_that_load_by_torch_while_they_are_loaded_have_their_values(tmp_path, hooked):
    torch_save({"packed": Packed(values(100)), "behind": values(7)}, tmp_path / "x.pt")
    with gdsdata.torch_hooks() if hooked else contextlib.nullcontext():
        load = torch.load if hooked else gdsdata.load
        found = load(tmp_path / "x.pt", weights_only=False)
    assert torch.equal(found["packed"].tensor, values(100)) and torch.equal(found["behind"], values(7))


def test_other_map_locations_than_ours_are_asked_of_wrapper_subclasses(tmp_path):
    torch_save(state_of("two"), tmp_path / "x.pt")
    with torch.serialization.safe_globals([TwoTensor, torch.device]), gdsdata.torch_hooks():
        found = torch.load(tmp_path / "x.pt", map_location="meta")
        expected = torch_load(tmp_path / "x.pt", map_location="meta")
        assert found["it"].device == expected["it"].device == torch.device("meta")
        assert form(torch.load(tmp_path / "x.pt")) == form(torch_load(tmp_path / "x.pt"))


@pytest.mark.parametrize("kind", ["two", "dtensor", "coo"])
def test_plain_tensors_are_not_read_into_tensors_of_another_kind(tmp_path, kind):
    state = state_of(kind)
    shape = state["it"].shape
    torch_save(state | {"it": torch.ones(shape)}, tmp_path / "x.pt")
    target = emptied(kind)
    before = form(target)
    with pytest.raises(ValueError, match="it in .* is a plain Tensor.*load it without into="):
        gdsdata.load(tmp_path / "x.pt", into=target)
    assert form(target) == before
    with gdsdata.AsyncCheckpointer(tmp_path / "checkpoints") as checkpointer:
        checkpointer.save(1, {"state": state | {"it": torch.ones(3, 7)}}).result()
        with pytest.raises(ValueError, match="it"):
            checkpointer.restore({"state": target})
    assert form(target) == before


def test_a_model_of_dtensors_does_not_keep_its_weights_where_shapes_differ(tmp_path):
    def model(size: int) -> torch.nn.Module:
        made = torch.nn.Linear(size, 2, bias=False)
        made.weight = torch.nn.Parameter(sharded(torch.ones(2, size)))
        return made

    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model(3)}).result()
        with pytest.raises(ValueError, match=r"weight was saved as a tensor of \(2, 3\), .* \(2, 4\)"):
            checkpointer.restore({"model": model(4)})


def test_a_pickle_that_asks_for_other_storages_than_it_names_is_corrupt(tmp_path):
    torch_save(state_of("attributes"), tmp_path / "x.pt")
    archive = open_archive(OpenFile(str(tmp_path / "x.pt")))
    others = [torch.UntypedStorage(saved.size_bytes) for saved in archive.storages]
    archive.references.storages.reverse()
    with pytest.raises(CorruptData, match="asks for other storages than it names"):
        archive_reader.unpickle(archive, others, weights_only=True)


def test_dcp_names_the_sparse_tensor_that_it_refuses(tmp_path):
    with pytest.raises(CheckpointException, match="it is a tensor of torch.sparse_coo"):
        dcp.save(state_of("coo"), storage_writer=gdsdata.GDSStorageWriter(tmp_path))


def test_whole_loads_for_some_tensors_verify_checksums_too(tmp_path):
    gdsdata.save(state_of("module"), tmp_path / "x.pt")
    content = bytearray((tmp_path / "x.pt").read_bytes())
    content[open_archive(OpenFile(str(tmp_path / "x.pt"))).records["data/0"].offset] ^= 1
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CorruptData, match="checksum"):
        gdsdata.load(tmp_path / "x.pt", only=["it"], weights_only=False, verify=True)


def zeros_without_memory() -> torch.Tensor:
    return torch._efficientzerotensor((4, 5))


def test_no_way_of_saving_accepts_tensors_of_zeros_without_memory(tmp_path):
    state = {"it": zeros_without_memory(), "behind": values(3)}

    def by_async_checkpointer() -> None:
        with gdsdata.AsyncCheckpointer(tmp_path / "async") as checkpointer:
            checkpointer.save(1, {"state": state}).result()

    def by_dcp() -> None:
        dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(tmp_path / "dcp"))

    for save in (lambda: gdsdata.save(state, tmp_path / "x.pt"), by_async_checkpointer, by_dcp):
        with pytest.raises((RuntimeError, CheckpointException), match="ZeroTensor is not serializable"):
            save()
    with pytest.raises(ValueError, match="^it is .* no plain tensor"):
        gdsdata.save(state, tmp_path / "x.safetensors")
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".lock"}


def test_tensors_of_zeros_without_memory_are_never_read_into(tmp_path):
    saved = {"it": torch.ones(4, 5), "behind": values(3)}
    target = {"it": zeros_without_memory(), "behind": torch.zeros(3)}
    for name in ("x.pt", "x.safetensors"):
        gdsdata.save(saved, tmp_path / name)
        with pytest.raises(ValueError, match="it in .* load it without into="):
            gdsdata.load(tmp_path / name, into=target)
        assert target["behind"].tolist() == [0, 0, 0]
    dcp.save(saved, storage_writer=gdsdata.GDSStorageWriter(tmp_path / "dcp"))
    with pytest.raises(CheckpointException, match="ZeroTensors are immutable"):
        dcp.load(target, storage_reader=gdsdata.GDSStorageReader(tmp_path / "dcp"))


def freed_tensor() -> torch.Tensor:
    """Return a tensor as FSDP leaves a parameter between two uses."""
    tensor = torch.ones(300, 300)
    tensor.untyped_storage().resize_(0)
    return tensor


FREED_FILES = [("torchs.pt", "torchs"), ("hooked.pt", "archive")]
FREED = "^it has a shape and no memory to {}, because its storage was freed"


def by_async_checkpointer(state: Any, folder: Any) -> None:
    with gdsdata.AsyncCheckpointer(folder) as checkpointer:
        checkpointer.save(1, state).result()


@pytest.mark.parametrize(
    "save",
    [
        lambda state, folder: gdsdata.save(state, folder / "x.pt"),
        lambda state, folder: gdsdata.save(state, folder / "x.safetensors"),
        lambda state, folder: by_async_checkpointer(state, folder / "async"),
        lambda state, folder: gdsdata.safetensors.save_file(state, folder / "x.safetensors"),
        lambda state, folder: dcp.save(state, storage_writer=gdsdata.GDSStorageWriter(folder / "dcp")),
    ],
    ids=["pt", "safetensors", "AsyncCheckpointer", "save_file", "dcp"],
)
def test_no_way_of_saving_writes_what_lies_where_a_tensors_memory_was(tmp_path, save):
    with pytest.raises((ValueError, CheckpointException, SafetensorError)) as caught:
        save({"it": freed_tensor(), "behind": values(3)}, tmp_path)
    if isinstance(caught.value, ValueError):
        assert re.match(FREED.format("save"), str(caught.value))
    elif isinstance(caught.value, CheckpointException):
        assert re.search(FREED.format("save").lstrip("^"), str(caught.value))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".lock"}


def test_hooks_save_a_tensor_whose_memory_was_freed_as_torch_does(tmp_path):
    torch_save({"it": freed_tensor()}, tmp_path / "torchs.pt")
    with gdsdata.torch_hooks():
        torch.save({"it": freed_tensor()}, tmp_path / "hooked.pt")
    sizes = [zipfile.ZipFile(tmp_path / name).getinfo(f"{folder}/data/0").file_size for name, folder in FREED_FILES]
    assert sizes == [0, 0]


def test_nothing_is_read_into_a_tensor_whose_memory_was_freed(tmp_path):
    saved = {"behind": torch.ones(3), "it": torch.ones(300, 300)}
    state = {"behind": torch.zeros(3), "it": freed_tensor()}
    for name in ("x.pt", "x.safetensors"):
        gdsdata.save(saved, tmp_path / name)
        with pytest.raises(ValueError, match=FREED.format("fill from '.*'")):
            gdsdata.load(tmp_path / name, into=state)
    with gdsdata.AsyncCheckpointer(tmp_path / "async") as checkpointer:
        checkpointer.save(1, saved).result()
        with pytest.raises(ValueError, match=FREED.format("fill from '.*'")):
            checkpointer.restore(state)
    dcp.save(saved, storage_writer=gdsdata.GDSStorageWriter(tmp_path / "dcp"))
    with pytest.raises(CheckpointException, match=FREED.format("fill").lstrip("^")):
        dcp.load(state, storage_reader=gdsdata.GDSStorageReader(tmp_path / "dcp"))
    assert state["behind"].tolist() == [0, 0, 0]
    assert state["it"].untyped_storage().nbytes() == 0


def test_an_empty_tensor_is_none_whose_memory_was_freed(tmp_path):
    for name in ("x.pt", "x.safetensors"):
        gdsdata.save({"empty": torch.empty(0, 3)}, tmp_path / name)
        assert gdsdata.load(tmp_path / name, into={"empty": torch.empty(0, 3)})["empty"].shape == (0, 3)
    with gdsdata.AsyncCheckpointer(tmp_path / "async") as checkpointer:
        checkpointer.save(1, {"empty": torch.empty(0, 3)}).result()


def module_of(make: Callable[[], torch.Tensor]) -> torch.nn.Module:
    made = torch.nn.Module()
    made.weight = torch.nn.Parameter(make(), requires_grad=False)
    return made


@pytest.mark.parametrize(
    ("saved", "other", "words"),
    [
        (coded, lambda: torch.zeros(3, 2), "weight was saved as a Coded and is a Tensor here"),
        (lambda: torch.zeros(3, 2), coded, "weight was saved as a Tensor and is a Coded here"),
    ],
)
def test_a_model_whose_tensors_have_another_kind_is_an_error_that_names_both(tmp_path, saved, other, words):
    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": module_of(saved), "weights": {"it": saved()}}).result()
        with torch.serialization.safe_globals([Coded]):
            with pytest.raises(ValueError, match=words + ": make .* as it was when it was saved"):
                checkpointer.restore({"model": module_of(other)})
            with pytest.raises(ValueError, match=r"weights\.it .*: make .* as it was when it was saved"):
                checkpointer.restore({"weights": {"it": other()}})


# ------------------------------------------------------------------------------------------------ torchao's

QUANTIZED_BY = [
    "Int8WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Float8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
]
OPTIMIZER_STATES = ["subclass_8bit.OptimState8bit", "subclass_4bit.OptimState4bit", "subclass_fp8.OptimStateFp8"]


def quantized_model(config: str, seed: int) -> torch.nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256, dtype=torch.bfloat16), torch.nn.LayerNorm(256))
    quantization.quantize_(model, getattr(quantization, config)())
    return model


def quantized_by_torchao(kind: str) -> torch.Tensor:
    if kind in QUANTIZED_BY:
        return quantized_model(kind, seed=1)[0].weight
    if kind == "NF4":
        nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
        return nf4.to_nf4(torch.randn(256, 256))
    module, name = kind.split(".")
    return getattr(pytest.importorskip(f"torchao.optim.{module}"), name).zeros((4096,))


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("kind", [*QUANTIZED_BY, *OPTIMIZER_STATES, "NF4"])
def test_tensors_quantized_by_torchao_are_saved_and_loaded_as_by_torch(tmp_path, kind, weights_only):
    state = {"before": values(2), "it": quantized_by_torchao(kind), "behind": values(5000)}
    torch_save(state, tmp_path / "torchs.pt")
    expected = attempt(lambda: torch_load(tmp_path / "torchs.pt", weights_only=weights_only))
    with gdsdata.torch_hooks():
        torch.save(state, tmp_path / "hooks.pt")
        for name in ("torchs.pt", "hooks.pt"):
            assert attempt(lambda name=name: torch.load(tmp_path / name, weights_only=weights_only)) == expected
    gdsdata.save(state, tmp_path / "ours.pt")
    assert attempt(lambda: gdsdata.load(tmp_path / "ours.pt", weights_only=weights_only)) == expected
    assert attempt(lambda: gdsdata.load(tmp_path / "ours.pt", only=["*"], weights_only=weights_only)) == expected


@pytest.mark.parametrize("kind", [*QUANTIZED_BY, *OPTIMIZER_STATES, "NF4"])
def test_tensors_quantized_by_torchao_are_read_into_the_same_kind_alone(tmp_path, kind):
    gdsdata.save({"it": quantized_by_torchao(kind)}, tmp_path / "x.pt")
    target = {"it": (it := quantized_by_torchao(kind))}
    codes = getattr(it, it.__tensor_flatten__()[0][0])
    codes.copy_(torch.ones_like(codes))
    expected = form(gdsdata.load(tmp_path / "x.pt"))[1:]  # without the pickle, which counts attributes
    assert form({"it": it})[1:] != expected
    gdsdata.load(tmp_path / "x.pt", into=target)
    assert target["it"] is it and form({"it": it})[1:] == expected
    with pytest.raises(ValueError, match="it in .* load it without into="):
        gdsdata.load(tmp_path / "x.pt", into={"it": torch.zeros(it.shape, dtype=it.dtype)})


@pytest.mark.parametrize("config", QUANTIZED_BY)
def test_a_model_that_torchao_quantized_goes_through_asynccheckpointer(tmp_path, config):
    model, other = quantized_model(config, seed=1), quantized_model(config, seed=2)
    with gdsdata.AsyncCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": model, "weights": dict(model.state_dict())}).result()
        weights = dict(other.state_dict())
        assert form(weights) != form(dict(model.state_dict()))
        checkpointer.restore({"model": other, "weights": weights})
    assert form(weights) == form(dict(model.state_dict())) == form(dict(other.state_dict()))


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_within_fake_tensor_mode_loads_and_saves_are_refused(tmp_path, name):
    """An own process, because a read to the address of a fake tensor ends the process."""
    path = str(tmp_path / name)
    gdsdata.save({"it": torch.ones(300)}, path)
    script = f"""
import torch, gdsdata, gdsdata.safetensors
from torch._subclasses.fake_tensor import FakeTensorMode

state = {{"it": torch.ones(300)}}
for call in (
    lambda: gdsdata.load({path!r}),
    lambda: gdsdata.load({path!r}, into=state),
    lambda: gdsdata.save(state, {path!r}),
    *([lambda: gdsdata.safetensors.load_file({path!r})] if {path!r}.endswith("safetensors") else []),
):
    with FakeTensorMode():
        try:
            call()
        except RuntimeError as error:
            assert str(error).startswith("FakeTensorMode is active"), error
        else:
            raise AssertionError("it was not refused")
assert gdsdata.load({path!r})["it"].tolist() == [1.0] * 300
"""
    assert run_script(script) == (0, "", "")


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_the_backend_of_a_compilation_loads_and_saves_real_tensors(tmp_path, name):
    """torch.compile calls it with the mode of its fake tensors noted, and not active."""
    path, values = str(tmp_path / name), torch.arange(300.0)
    with torch._guards.tracing(torch._guards.TracingContext(torch._subclasses.FakeTensorMode())):
        gdsdata.save({"it": values}, path)
        assert torch.equal(gdsdata.load(path)["it"], values)
