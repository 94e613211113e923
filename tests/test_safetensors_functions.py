"""`gdsdata.safetensors` beside the package `safetensors`: results, files, errors, read-ahead."""

import errno
import gc
import inspect
import os
import stat
import sys
import threading
import time
import types

import pytest
import torch
from folder_store import FolderStore, install
from helpers import exit_code_of_fork, interrupted_at_call
from object_server import serving

import gdsdata
from gdsdata import safetensors as ours
from gdsdata.checkpoint import tensor_reader
from gdsdata.checkpoint.safetensors import files, installed, read_ahead
from gdsdata.checkpoint.safetensors import stock as stock_functions
from gdsdata.checkpoint.safetensors.errors import NotInstalled
from gdsdata.checkpoint.safetensors.numbered_names import by_numbers
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.parsers.safetensors_header import DTYPES

stock_package = pytest.importorskip("safetensors")
stock = pytest.importorskip("safetensors.torch")

FUNCTIONS = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


def bits(tensor: torch.Tensor) -> tuple:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().flatten().view(torch.uint8).tolist()


def tensors_of_all_dtypes() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    found = {}
    for code, dtype in DTYPES.items():
        raw = torch.randint(2, (4, 6 * dtype.itemsize), dtype=torch.uint8, generator=chance)
        found[f"layers.{len(found)}.{code}"] = raw.view(dtype)
    return found | {"empty": torch.zeros(2, 0), "scalar": torch.tensor(1.5), 'é\n"\\\x01': torch.ones(3)}


@pytest.fixture
def path(tmp_path) -> str:
    stock.save_file(tensors_of_all_dtypes(), tmp_path / "a.safetensors", {"k": "ü\n"})
    return str(tmp_path / "a.safetensors")


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 4)
        self.head = torch.nn.Linear(4, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = torch.nn.Parameter(torch.randn(4, 3).t())


# ---------------------------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_has_the_parameters_and_defaults_of_the_packages(name):
    def parameters(function):
        return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]

    assert parameters(getattr(ours, name)) == parameters(getattr(stock, name))


def test_safe_open_has_the_methods_of_the_packages():
    public = {name for name in dir(stock_package.safe_open) if not name.startswith("_")}
    assert public == {name for name in dir(ours.safe_open) if not name.startswith("_")}


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_a_file_of_all_dtypes_is_read_as_by_the_package(path, backend):
    with ours.safe_open(path, framework="pt", backend=backend) as mine, stock_package.safe_open(path, "pt") as its:
        assert mine.keys() == its.keys()
        assert mine.offset_keys() == its.offset_keys()
        assert mine.metadata() == its.metadata() == {"k": "ü\n"}
        for name in mine.keys():  # noqa: SIM118 (it is no dict)
            assert bits(mine.get_tensor(name)) == bits(its.get_tensor(name))
            assert mine.get_slice(name).get_dtype() == its.get_slice(name).get_dtype()
            assert mine.get_slice(name).get_shape() == its.get_slice(name).get_shape()
        expected = its.get_tensors()
    for found in (ours.load_file(path), mine_of(path)):
        assert list(found) == list(expected)
        assert {name: bits(one) for name, one in found.items()} == {name: bits(one) for name, one in expected.items()}


def mine_of(path):
    with ours.safe_open(path, "pytorch", None) as file:
        return file.get_tensors()


def test_a_file_without_metadata_has_none(tmp_path):
    for said in (None, {}):
        stock.save_file({"a": torch.ones(1)}, tmp_path / "a", said)
        with ours.safe_open(tmp_path / "a", "pt") as mine:
            assert mine.metadata() == said


INDEXES = [
    ...,
    (),
    0,
    -1,
    slice(None),
    slice(2, 4),
    slice(0, 0),
    slice(None, None, 3),
    (slice(None), 1),
    (slice(None), slice(1, 3)),
    (..., slice(2, 5, 2)),
    (2, ..., 1),
    (1, 2, 3),
    (None, slice(1, 2)),
    (slice(-2, None), slice(None), -1),
    [],
    [1, 0],
    (slice(None), [0, 2]),
    torch.tensor([2, 1]),
    torch.tensor([True, False, True, False, True]),
    True,
]


@pytest.mark.parametrize("by", ["page cache", "engine"])
@pytest.mark.parametrize("index", INDEXES, ids=str)
def test_a_slice_has_the_values_that_torch_gives(tmp_path, monkeypatch, index, by):
    if by == "engine":
        monkeypatch.setattr(read_ahead, "_SHORT_BYTES", 0)
    tensor = torch.arange(5 * 4 * 6).view(5, 4, 6)
    stock.save_file({"other": torch.ones(100), "x": tensor}, tmp_path / "a")
    with ours.safe_open(tmp_path / "a", "pt") as file:
        part = file.get_slice("x")
    assert torch.equal(part[index], tensor[index])  # after the file is closed, too


@pytest.mark.parametrize("index", [5, (0, 0, 0, 0), (slice(None, None, -1),), 1.5])
def test_a_wrong_index_is_torchs_own_error(tmp_path, index):
    stock.save_file({"x": torch.arange(20).view(5, 4)}, tmp_path / "a")
    with ours.safe_open(tmp_path / "a", "pt") as mine, stock_package.safe_open(tmp_path / "a", "pt") as its:
        with pytest.raises(Exception) as expected:
            its.get_slice("x")[index]
        with pytest.raises(type(expected.value)):
            mine.get_slice("x")[index]


@pytest.fixture
def sizes(monkeypatch) -> list[int]:
    """Note the sizes of the engine's reads."""
    noted = []
    run = tensor_reader.TensorReader._read
    monkeypatch.setattr(
        tensor_reader.TensorReader,
        "_read",
        lambda self, engine, before, extents: noted.extend(extents.sizes_bytes) or run(self, engine, before, extents),
    )
    return noted


def test_a_slice_reads_no_more_than_its_rows(tmp_path, monkeypatch, sizes):
    monkeypatch.setattr(read_ahead, "_SHORT_BYTES", 0)  # as if it were not in the page cache
    stock.save_file({"x": torch.arange(1 << 20, dtype=torch.int64).view(1024, 1024)}, tmp_path / "a")
    with ours.safe_open(tmp_path / "a", "pt") as file:
        assert file.get_slice("x")[3:5].sum() == torch.arange(3 * 1024, 5 * 1024).sum()
    assert sum(sizes) == 2 * 1024 * 8


def test_short_parts_that_are_cached_are_read_by_the_caller(tmp_path, sizes):
    tensor = torch.arange(1 << 18).view(512, 512)  # 2 MiB
    stock.save_file({"other": torch.ones(3), "x": tensor}, tmp_path / "a")
    with ours.safe_open(tmp_path / "a", "pt") as file:
        part = file.get_slice("x")
        for index in [(slice(3, 9),), (slice(0, 256), slice(100, 400)), (slice(8, 40), slice(5, 6)), (7, slice(1, 9))]:
            found = part[index]
            assert torch.equal(found, tensor[index]) and found.is_contiguous()
            assert found.untyped_storage().nbytes() == found.nbytes  # no gaps are kept
        assert sizes == []
        assert torch.equal(part[:, 5:6], tensor[:, 5:6])  # a column spans nearly all
        assert sizes != []


@pytest.mark.parametrize("dtype", sorted(DTYPES.values(), key=str), ids=str)
def test_a_part_with_gaps_has_its_bytes_for_each_dtype(tmp_path, sizes, dtype):
    content = torch.arange(4 * 6 * dtype.itemsize, dtype=torch.uint8) % 2
    tensor = content.view(dtype).view(4, 6)
    gdsdata.save({"x": tensor}, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").read_bytes()  # into the page cache
    with ours.safe_open(tmp_path / "a.safetensors", "pt") as file:
        found = file.get_slice("x")[1:3, 2:5]
    assert sizes == []
    expected = content.view(4, 6, dtype.itemsize)[1:3, 2:5]
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8).view(2, 3, dtype.itemsize), expected)


# ---------------------------------------------------------------------------------------------------------- read-ahead


def layers(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.{what}": torch.full((64,), i * 10.0) for i in range(count) for what in ("a", "b")}


@pytest.fixture
def reads(monkeypatch) -> list[list[str]]:
    """Note the names of each batch of the engine, as if nothing were in the page cache."""
    monkeypatch.setattr(read_ahead, "_SHORT_BYTES", 0)
    monkeypatch.setattr(read_ahead, "_FIRST_BYTES", 1024)
    monkeypatch.setattr(read_ahead, "_MOST_BYTES", 2048)
    noted = []

    class Batch(read_ahead._Batch):
        def __init__(self, wanted, *others):
            noted.append(list(wanted))
            super().__init__(wanted, *others)

    monkeypatch.setattr(read_ahead, "_Batch", Batch)
    return noted


ORDERS = {
    "names": sorted,
    "file": lambda names: sorted(names, reverse=True),  # as `save_reversed` lays them out
    "numbers": lambda names: sorted(names, key=lambda name: (int(name.split(".")[1]), name)),
}


def save_reversed(tensors, path):
    """Write a file whose order is not that of the names."""
    names = sorted(tensors, reverse=True)
    gdsdata.save({f"{i:04}": tensors[name] for i, name in enumerate(names)}, path)
    content = path.read_bytes()
    for i, name in enumerate(names):
        content = content.replace(f'"{i:04}":{{'.encode(), f'"{name}":{{'.encode())
    header = len(content) - path.stat().st_size + int.from_bytes(content[:8], "little")
    path.write_bytes(header.to_bytes(8, "little") + content[8:])


@pytest.mark.parametrize("order", ORDERS)
def test_a_loop_in_a_known_order_reads_each_tensor_once_and_in_batches(tmp_path, reads, order):
    tensors = layers(30)
    save_reversed(tensors, tmp_path / "a.safetensors")
    with ours.safe_open(tmp_path / "a.safetensors", "pt") as file:
        names = ORDERS[order](tensors)
        for name in names:
            assert torch.equal(file.get_tensor(name), tensors[name])
    # Before the orders differ, what follows in another one is read too.
    assert len([name for batch in reads for name in batch]) <= len(names) + (12 if order == "numbers" else 0)
    assert len(reads) <= 14
    assert max(map(len, reads)) == 8


def test_numbers_in_names_may_have_any_number_of_digits(tmp_path, reads):
    tensors = {name: torch.ones(3) for name in ("a" + "9" * 5000, "a1" + "0" * 5000, "a2", "a010")}
    gdsdata.save(tensors, tmp_path / "a.safetensors")
    with ours.safe_open(tmp_path / "a.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), tensors[name]) for name in tensors)
    assert sorted(tensors, key=by_numbers) == ["a2", "a010", "a" + "9" * 5000, "a1" + "0" * 5000]


def test_a_loop_whose_first_tensors_were_cached_reads_the_others_in_batches(tmp_path, monkeypatch, reads):
    tensors = layers(100)
    stock.save_file(tensors, tmp_path / "a")
    names = sorted(tensors)
    cached = set(names[: len(names) // 2])

    def is_cached(self, stored, device):
        (name,) = (name for name, one in self._tensors.items() if one is stored)
        return tensors[name].clone() if name in cached else None

    monkeypatch.setattr(read_ahead.ReadAhead, "_from_page_cache", is_cached)
    with ours.safe_open(tmp_path / "a", "pt") as file:
        for name in names:
            assert torch.equal(file.get_tensor(name), tensors[name])
    assert sorted(name for batch in reads for name in batch) == sorted(set(names) - cached)
    assert len(reads[0]) == 1 and len(reads) < len(cached) / 4


def test_tensors_in_no_order_are_read_alone(tmp_path, reads):
    tensors = {f"{i:02}": torch.full((64,), i) for i in range(60)}
    stock.save_file(tensors, tmp_path / "a")
    names = [f"{i * 23 % 60:02}" for i in range(60)]
    with ours.safe_open(tmp_path / "a", "pt") as file:
        for name in names:
            assert torch.equal(file.get_tensor(name), tensors[name])
    assert reads == [[name] for name in names]


@pytest.mark.parametrize("step", [1, 2])
def test_a_loop_has_no_more_in_memory_than_two_batches(tmp_path, reads, step):
    stock.save_file(layers(100), tmp_path / "a")
    with ours.safe_open(tmp_path / "a", "pt") as file:
        for name in file.keys()[::step]:
            file.get_tensor(name)
            ahead = file._reader._ahead
            assert sum(tensor.nbytes for _, tensor in ahead._found.values()) == ahead.bytes <= 2 * 2048


def test_a_tensor_costs_no_more_if_many_were_read_ahead(tmp_path, monkeypatch):
    """It took 5 ms with 16,000, as all of them were counted each time."""
    monkeypatch.setattr(read_ahead, "_SHORT_BYTES", 0)

    def seconds_each(count: int) -> float:
        stock.save_file({f"{i:05}": torch.full((4,), i) for i in range(count)}, tmp_path / f"{count}")
        took = []
        for _ in range(3):
            with ours.safe_open(tmp_path / f"{count}", "pt") as file:
                names = file.keys()
                began = time.perf_counter()
                assert [int(file.get_tensor(name)[3]) for name in names] == [*range(count)]
                took.append(time.perf_counter() - began)
        return min(took) / count

    assert seconds_each(8000) < 4 * seconds_each(500)


def test_threads_share_a_loop(tmp_path, reads):
    tensors = layers(100)
    stock.save_file(tensors, tmp_path / "a")
    names = iter(sorted(tensors))
    lock, wrong = threading.Lock(), []
    with ours.safe_open(tmp_path / "a", "pt") as file:

        def take():
            while True:
                with lock:
                    name = next(names, None)
                if name is None:
                    return
                if not torch.equal(file.get_slice(name)[:], tensors[name]):
                    wrong.append(name)

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("device", [0, "cuda", torch.device("cuda:0")])
def test_a_loop_reads_to_a_gpu(tmp_path, device):
    tensors = layers(30)
    stock.save_file(tensors, tmp_path / "a")
    with ours.safe_open(tmp_path / "a", "pt", device=device) as file:
        for name, tensor in file.get_tensors().items():
            assert tensor.is_cuda and torch.equal(tensor.cpu(), tensors[name])
        for name in file.keys():  # noqa: SIM118
            tensor, part = file.get_tensor(name), file.get_slice(name)[3:9]
            assert tensor.is_cuda and torch.equal(tensor.cpu(), tensors[name])
            assert part.is_cuda and torch.equal(part.cpu(), tensors[name][3:9])
    ours.save_file({name: tensor.cuda() for name, tensor in tensors.items()}, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes()


@pytest.mark.parametrize(
    ("missing", "is_not_installed"), [("safetensors", True), ("safetensors._safetensors_rust", False), ("numpy", False)]
)
def test_only_a_missing_package_is_called_not_installed(monkeypatch, missing, is_not_installed):
    def fail():
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    monkeypatch.setattr(stock_functions, "_stock", fail)
    with pytest.raises(ImportError) as error:
        stock_functions.stock("load")
    assert isinstance(error.value, NotInstalled) == is_not_installed
    assert is_not_installed or missing in str(error.value)


class TestPageCache:
    @pytest.fixture
    def batches(self, reads, monkeypatch):
        monkeypatch.setattr(read_ahead, "_SHORT_BYTES", 256)
        return reads

    @pytest.fixture
    def path(self, tmp_path):
        stock.save_file(layers(5) | {"long": torch.arange(100.0)}, tmp_path / "a")
        return tmp_path / "a"

    def test_short_tensors_that_it_has_are_read_without_the_engine(self, path, batches):
        with ours.safe_open(path, "pt") as file:
            for name, tensor in layers(5).items():
                assert torch.equal(file.get_tensor(name), tensor)
            assert batches == []
            file.get_tensor("long")
        assert batches == [["long"]]

    @pytest.mark.parametrize("answer", [100, OSError(errno.EAGAIN, ""), OSError(errno.EOPNOTSUPP, "")])
    def test_tensors_that_it_does_not_have_are_read_by_the_engine(self, path, batches, monkeypatch, answer):
        asked = []

        def preadv(descriptor, buffers, offset, flags):
            asked.append(flags)
            if isinstance(answer, OSError):
                raise answer
            return answer

        monkeypatch.setattr(os, "preadv", preadv)
        with ours.safe_open(path, "pt") as file:
            for name in ("layers.0.a", "layers.3.a", "layers.0.b"):
                assert torch.equal(file.get_tensor(name), layers(5)[name])
        assert len(batches) >= 3
        unknown = isinstance(answer, OSError) and answer.errno == errno.EOPNOTSUPP
        assert asked == [os.RWF_NOWAIT] * (1 if unknown else len(asked)) and asked

    def test_a_python_that_cannot_ask_it_reads_by_the_engine(self, path, batches, monkeypatch):
        monkeypatch.delattr(os, "RWF_NOWAIT")
        with ours.safe_open(path, "pt") as file:
            assert torch.equal(file.get_tensor("layers.0.a"), layers(5)["layers.0.a"])
            assert torch.equal(file.get_slice("layers.0.a")[:1], layers(5)["layers.0.a"][:1])
        assert batches == [["layers.0.a"]]

    def test_a_file_that_was_changed_is_corrupt_data(self, path, batches):
        with ours.safe_open(path, "pt") as file:
            os.utime(path, (1, 1))
            with pytest.raises(CorruptData, match="was changed"):
                file.get_tensor("layers.0.a")

    def test_a_default_device_is_not_used(self, path):
        with ours.safe_open(path, "pt") as file, torch.device("meta"):
            assert torch.equal(file.get_tensor("layers.1.a"), layers_on_cpu(5)["layers.1.a"])


def layers_on_cpu(count: int) -> dict[str, torch.Tensor]:
    with torch.device("cpu"):
        return layers(count)


def test_tensors_that_are_read_ahead_share_no_memory(tmp_path):
    stock.save_file(layers(10), tmp_path / "a")
    with ours.safe_open(tmp_path / "a", "pt") as file:
        found = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == 20
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found)


# ------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("metadata", [None, {}, {"k": 'ü"\\\x7f\u2028'}])
def test_a_file_has_the_bytes_that_the_package_writes(tmp_path, metadata):
    tensors = tensors_of_all_dtypes() | {"long": torch.arange(300_000, dtype=torch.int32)}
    stock.save_file(tensors, tmp_path / "its", metadata)
    ours.save_file(tensors, tmp_path / "mine", metadata)
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "its").read_bytes()


def test_a_file_without_tensors_has_the_packages_bytes(tmp_path):
    stock.save_file({}, tmp_path / "its")
    ours.save_file({}, tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "its").read_bytes()


def test_the_mode_of_a_new_file_follows_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        ours.save_file({"a": torch.ones(1)}, tmp_path / "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


BASE = torch.arange(12.0)
REFUSED = {
    "no dict": ["a"],
    "no tensor": {"a": 1},
    "sparse": {"a": torch.eye(2).to_sparse()},
    "strides": {"a": torch.ones(2, 3).t()},
    "shared": {"a": BASE, "b": BASE[3:]},
    "meta": {"a": torch.ones(1, device="meta")},
    "complex128": {"a": torch.ones(1, dtype=torch.complex128)},
    "half a character": {"\udc00": torch.ones(1)},
    "a number as a name": {1: torch.ones(1)},
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_state_that_the_package_refuses_is_refused_by_its_own_error(tmp_path, what):
    with pytest.raises(Exception) as expected:
        stock.save_file(REFUSED[what], tmp_path / "a")
    with pytest.raises(type(expected.value)) as found:
        ours.save_file(REFUSED[what], tmp_path / "a")
    assert str(found.value) == str(expected.value)
    assert not (tmp_path / "a").exists()


def test_metadata_of_another_type_is_refused(tmp_path):
    with pytest.raises(TypeError):
        ours.save_file({"a": torch.ones(1)}, tmp_path / "a", {"k": 1})


def test_bytes_go_through_the_package():
    content = ours.save({"a": torch.arange(3)}, {"k": "v"})
    assert content == stock.save({"a": torch.arange(3)}, {"k": "v"})
    assert torch.equal(ours.load(content)["a"], torch.arange(3))


# ------------------------------------------------------------------------------------------------------ tied tensors


def test_a_model_with_tied_weights_is_saved_as_by_the_package(tmp_path):
    model = Tied()
    stock.save_model(model, tmp_path / "its", {"k": "v"})
    metadata = {"k": "v"}
    ours.save_model(model, tmp_path / "mine", metadata)
    with stock_package.safe_open(tmp_path / "its", "pt") as its, ours.safe_open(tmp_path / "mine", "pt") as mine:
        assert mine.metadata() == its.metadata() == metadata
        assert mine.keys() == its.keys() == ["embedding.weight", "turned"]
    for load_model in (stock.load_model, ours.load_model):
        for name in ("its", "mine"):
            other = Tied()
            assert load_model(other, tmp_path / name) == (set(), [])
            assert other.head.weight is other.embedding.weight
            assert all(torch.equal(*pair) for pair in zip(other.parameters(), model.parameters(), strict=True))


def test_tied_weights_in_save_are_refused_and_save_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="gdsdata.safetensors.save_model"):
        gdsdata.save(Tied().state_dict(), tmp_path / "a.safetensors")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("other", [torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(3, 2))])
def test_names_that_differ_are_the_packages_error(tmp_path, strict, other):
    ours.save_model(torch.nn.Linear(3, 2, bias=False), tmp_path / "a")
    outcomes = []
    for load_model in (stock.load_model, ours.load_model):
        try:
            outcomes.append(load_model(other, tmp_path / "a", strict))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


def test_a_part_of_a_tensor_alone_is_refused_as_by_the_package(tmp_path):
    model = torch.nn.Module()
    model.part = torch.nn.Parameter(torch.ones(10)[:5])
    for save_model in (stock.save_model, ours.save_model):
        with pytest.raises(RuntimeError, match="none of|no suitable name"):
            save_model(model, tmp_path / "a")


def test_strides_are_refused_without_force_contiguous(tmp_path):
    with pytest.raises(ValueError, match="force_contiguous=True"):
        ours.save_model(Tied(), tmp_path / "a", force_contiguous=False)


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_missing_file_is_the_packages_error(tmp_path):
    for open_file in (ours.safe_open, stock_package.safe_open):
        with pytest.raises(FileNotFoundError) as error:
            open_file(tmp_path / "none", "pt")
        assert str(error.value) == f"No such file or directory: {tmp_path / 'none'}"


def test_a_missing_tensor_and_a_closed_file_are_the_packages_errors(path):
    for open_file in (ours.safe_open, stock_package.safe_open):
        with open_file(path, "pt") as file:
            for method in (file.get_tensor, file.get_slice):
                with pytest.raises(stock_package.SafetensorError, match="^File does not contain tensor none$"):
                    method("none")
        for method in (file.keys, file.offset_keys, file.metadata, file.get_tensors, lambda: file.get_tensor("a")):
            with pytest.raises(stock_package.SafetensorError, match="^File is closed$"):
                method()


@pytest.mark.parametrize("content", [b"", b"\0" * 4, b"\xff" * 20, b"\x08" + b"\0" * 7 + b"[1,2,3] "])
def test_a_damaged_file_is_an_error_of_both_packages(tmp_path, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(stock_package.SafetensorError):
        stock_package.safe_open(tmp_path / "a", "pt")
    with pytest.raises(stock_package.SafetensorError) as error:
        ours.safe_open(tmp_path / "a", "pt")
    assert isinstance(error.value, CorruptData)
    assert ours.SafetensorError is stock_package.SafetensorError


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors.index.json", b'{"weight_map": {}}', r"of several is read by gdsdata.load\('.*json'\)"),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer. Run `git lfs pull`"),
        (
            "model.pt",
            b"PK\x03\x04" + bytes(9),
            r"a file of torch.save.* gdsdata.load\('.*model.pt'\)",
        ),
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ours.SafetensorError, match=said):
        ours.load_model(torch.nn.Linear(1, 1), tmp_path / name)


def test_a_file_that_cannot_be_written_is_an_error_of_both_packages(tmp_path):
    for save_file in (stock.save_file, ours.save_file):
        with pytest.raises(stock_package.SafetensorError, match="Error while serializing") as error:
            save_file({"a": torch.ones(1)}, tmp_path / "none" / "a")
    assert isinstance(error.value, IoError)


@pytest.mark.parametrize(
    ("framework", "device", "backend"), [("none", "cpu", "mmap"), ("pt", "none", "mmap"), ("pt", "cpu", "none")]
)
def test_an_unknown_argument_is_the_packages_error(path, framework, device, backend):
    texts = []
    for open_file in (stock_package.safe_open, ours.safe_open):
        with pytest.raises(stock_package.SafetensorError) as error:
            open_file(path, framework=framework, device=device, backend=backend)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_another_framework_goes_to_the_package(tmp_path):
    stock.save_file({"a": torch.arange(3)}, tmp_path / "a")
    with ours.safe_open(tmp_path / "a", framework="np") as file:
        assert type(file) is stock_package.safe_open
        assert file.get_tensor("a").tolist() == [0, 1, 2]


def test_a_gpu_that_is_not_there_is_an_error_when_a_tensor_is_read(path):
    with ours.safe_open(path, "pt", device=99) as file:
        assert file.keys()
        with pytest.raises(RuntimeError):
            file.get_tensor("scalar")


# ---------------------------------------------------------------------------------------------------------------- URLs


def test_urls_are_read_as_paths_are(monkeypatch):
    with serving(monkeypatch) as server:
        server.content["a.safetensors"] = stock.save(layers(50), {"k": "v"})
        expected = layers(50)
        with ours.safe_open(server.url("a.safetensors"), "pt") as file:
            assert file.metadata() == {"k": "v"}
            assert torch.equal(file.get_slice("layers.3.a")[5:9], expected["layers.3.a"][5:9])
            before = len(server.requests)
            for name in file.keys():  # noqa: SIM118
                assert torch.equal(file.get_tensor(name), expected[name])
            assert len(server.requests) - before <= 10
        found = ours.load_file(server.url("a.safetensors"))
        assert found.keys() == expected.keys()
        with pytest.raises(FileNotFoundError, match="No such file or directory: s3://bucket/none"):
            ours.safe_open(server.url("none"), "pt")


def test_a_file_is_saved_to_a_url(tmp_path, monkeypatch):
    from gdsdata.checkpoint import open_object
    from gdsdata.storage import stores

    monkeypatch.setattr(open_object, "OpenObject", open_object.OpenObject)  # `install` replaces both
    monkeypatch.setattr(stores, "_stores", dict(stores._stores))
    store = install(FolderStore(tmp_path / "bucket"))
    ours.save_model(Tied(), "s3://bucket/m.safetensors")
    stored = stock.load_file(store.path("m.safetensors"))
    assert set(stored) == {"embedding.weight", "turned"}


def test_the_state_of_a_model_is_written_by_gdsdata(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "stock", lambda name: pytest.fail(f"{name} was left to the package"))
    model = torch.nn.Linear(3, 4)
    ours.save_file(model.state_dict(), tmp_path / "a")
    assert torch.equal(stock.load_file(tmp_path / "a")["weight"], model.weight)


def test_a_loop_over_a_file_goes_on_after_ctrl_c(tmp_path, monkeypatch):
    stock.save_file({f"{i:02}": torch.full((1000,), i) for i in range(20)}, tmp_path / "a")
    monkeypatch.setattr(read_ahead, "_SHORT_BYTES", 0)  # the engine reads all of them

    def interrupt(reader):
        reader.cancel()
        raise KeyboardInterrupt

    with ours.safe_open(tmp_path / "a", "pt") as file:
        assert [int(file.get_tensor(f"{i:02}")[0]) for i in range(2)] == [0, 1]
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(tensor_reader.TensorReader, "_run", interrupt)
            file.get_tensor("02")
        assert [int(file.get_tensor(f"{i:02}")[0]) for i in range(3, 20)] == [*range(3, 20)]


def test_a_forked_child_goes_on_with_a_file_that_its_parent_reads_ahead(tmp_path, monkeypatch):
    tensors = {f"{i:02}": torch.full((1000,), i) for i in range(20)}
    stock.save_file(tensors, tmp_path / "a")
    monkeypatch.setattr(read_ahead, "_SHORT_BYTES", 0)  # the engine reads all of them
    file = ours.safe_open(tmp_path / "a", "pt")
    assert [int(file.get_tensor(f"{i:02}")[0]) for i in range(3)] == [0, 1, 2]
    batches = {batch for batch, _ in file._reader._ahead._found.values()}
    assert batches, "some are read ahead"
    for batch in batches:
        batch.wait = threading.Event().wait  # as if the parent's threads still read it

    def child():
        assert [int(file.get_tensor(f"{i:02}")[0]) for i in range(3, 20)] == [*range(3, 20)]

    assert exit_code_of_fork(child) == 0


# ------------------------------------------------------------------------------------------------------------- install


@pytest.fixture
def user_module(monkeypatch):
    """A module that took the functions of the package under names of its own."""
    module = types.ModuleType("user_of_safetensors")
    module.open_it, module.load_it, module.save_it = stock_package.safe_open, stock.load_file, stock.save_file
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_ctrl_c_at_any_call_of_a_block_leaves_the_functions_of_safetensors(monkeypatch):
    def replace_in_one_module(pairs):
        vars(stock).update({name: new for name, value in vars(stock).items() for old, new in pairs if value is old})

    monkeypatch.setattr(installed, "_replace", replace_in_one_module)  # fewer calls
    before, number = dict(vars(stock)), 1
    while interrupted_at_call(number, ours.installed, installed):
        gc.collect()  # a block whose end was interrupted ends here
        assert vars(stock) == before, f"call {number}"
        number += 1
    assert number > 10
    ours.install()
    ours.uninstall()
    assert vars(stock) == before


def test_installed_functions_stand_under_every_name_that_the_package_had(user_module):
    its = stock_package.safe_open, stock.load_file, stock.save_file
    user_module.of_gdsdata = ours.safe_open, ours.load_file, ours.save_file
    with ours.installed(), ours.installed():
        mine = stock_package.safe_open, stock.load_file, stock.save_file
        assert stock.safe_open is mine[0] and issubclass(mine[0], ours.safe_open)
        assert [one.__wrapped__ for one in mine[1:]] == [ours.load_file, ours.save_file]
        assert (user_module.open_it, user_module.load_it, user_module.save_it) == mine
        later = types.ModuleType("later_user")
        later.load_it = stock.load_file
        sys.modules["later_user"] = later
    try:
        assert (stock_package.safe_open, stock.load_file, stock.save_file) == its
        assert (user_module.open_it, user_module.load_it, user_module.save_it) == its
        assert later.load_it is stock.load_file
        assert user_module.of_gdsdata == (ours.safe_open, ours.load_file, ours.save_file)
    finally:
        del sys.modules["later_user"]


def test_other_frameworks_still_go_to_the_package_while_ours_is_installed(tmp_path):
    stock.save_file({"a": torch.arange(3)}, tmp_path / "a")
    with ours.installed(), stock_package.safe_open(tmp_path / "a", framework="np") as file:
        assert file.get_tensor("a").tolist() == [0, 1, 2]
        assert torch.equal(stock.load_file(tmp_path / "a")["a"], torch.arange(3))


def test_uninstall_without_install_is_an_error():
    with pytest.raises(RuntimeError, match="without an install"):
        ours.uninstall()
