"""read_tensor and write_tensor: the same bytes, atomic replacement of whole files, clear errors."""

import ctypes
import errno
import os
import random
import re
import resource
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import MIB, drop_cache, in_new_process, random_bytes, write_records

import gdsdata
from gdsdata import Engine, GDSDataset, read_tensor, write_tensor
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats import Records
from gdsdata.io import calibration

pytestmark = pytest.mark.usefixtures("quick_programs")

DTYPES = [
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128),
]
SIZES = [0, 1, 511, 512, 4095, 4096, 4097, MIB + 1, 3 * MIB + 4095]
OFFSETS = [0, 1, 511, 512, 4095, 4096, 4097, MIB + 3]


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return the memory of a contiguous tensor."""
    assert tensor.is_contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def tensor_of(data: bytes, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


# ------------------------------------------------------------------------------------------------- there and back


def test_a_calibration_is_looked_up_once_a_file_system_until_one_is_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(calibration, "_found", {})
    looked_up = []
    plain = calibration.load
    monkeypatch.setattr(calibration, "load", lambda: looked_up.append(1) or plain())
    (tmp_path / "x").write_bytes(bytes(10))
    options, device = gdsdata.EngineOptions(), torch.device("cuda", 0)

    def found(name, options=options):
        return calibration.calibrated(options, str(tmp_path / name), device, measure=False)

    assert [found("x"), found("x")] == [options, options] and len(looked_up) == 1
    calibration._keep(calibration.place_of(str(tmp_path), device), calibration.Calibration(workers=4))
    looked_up.clear()
    assert [found("x").workers, found("x").workers] == [4, 4] and len(looked_up) == 1
    assert found("x", gdsdata.EngineOptions(workers=2)).workers == 2, "options of the caller come first"
    assert found("to be written").workers == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_every_dtype_comes_back_as_it_was(tmp_path, dtype):
    data = bytes([0, 1] * 500 * dtype.itemsize) if dtype is torch.bool else random_bytes(1000 * dtype.itemsize)
    tensor = tensor_of(data, dtype).reshape(-1, 5, 20)
    write_tensor(tensor, tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == data
    again = read_tensor(tmp_path / "x", dtype, tensor.shape)
    assert (again.dtype, again.shape, bytes_of(again)) == (dtype, tensor.shape, data)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", OFFSETS)
def test_bytes_of_any_size_and_offset_come_back_warm_and_cold(tmp_path, size, offset):
    data = random_bytes(size, seed=size + offset)
    write_tensor(tensor_of(data), tmp_path / "x", offset)
    assert (tmp_path / "x").read_bytes() == (bytes(offset) + data if size or not offset else b"")
    assert bytes_of(read_tensor(tmp_path / "x", torch.uint8, (size,), offset)) == data
    drop_cache(tmp_path / "x")
    assert bytes_of(read_tensor(tmp_path / "x", torch.uint8, (size,), offset)) == data


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_writes_leaves_what_a_bytearray_would_hold(tmp_path, seed):
    choose, path, model = random.Random(seed), tmp_path / "x", bytearray()
    for step in range(40):
        offset = choose.choice([0, choose.randrange(len(model) + 5000)])
        data = choose.randbytes(choose.choice([0, 1, choose.randrange(9000), choose.randrange(200_000)]))
        write_tensor(tensor_of(data), path, offset)
        if data:
            model.extend(bytes(max(0, offset + len(data) - len(model))))
            model[offset : offset + len(data)] = data
        assert path.read_bytes() == model, f"step {step}: {len(data)} bytes at {offset}"
        if choose.random() < 0.3:
            drop_cache(path)
        start = choose.randrange(len(model) + 1)
        length = choose.randrange(len(model) - start + 1)
        assert bytes_of(read_tensor(path, torch.uint8, (length,), start)) == model[start : start + length]


def some_tensor() -> torch.Tensor:
    return torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: some_tensor().transpose(0, 2),
        lambda: some_tensor()[:, 1:, ::2],
        lambda: some_tensor()[1],
        lambda: torch.tensor(2.5).expand(3, 7),
        lambda: torch.tensor(1.5),
        lambda: some_tensor().requires_grad_(),
        lambda: torch.nn.Parameter(some_tensor()),
        lambda: torch.complex(some_tensor(), -some_tensor()).conj(),
        lambda: torch.complex(some_tensor(), -some_tensor()).conj().transpose(0, 1),
        lambda: torch.complex(some_tensor()[:1, :1, :1] + 1, some_tensor()[:1, :1, :1] + 2).conj().imag,
    ],
    ids=[
        *("transposed", "strided", "part of a storage", "expanded", "one element", "requires grad", "parameter"),
        *("conjugate view", "transposed conjugate view", "negative view"),
    ],
)
def test_a_view_is_written_as_the_values_that_it_shows(tmp_path, make):
    tensor = make()
    write_tensor(tensor, tmp_path / "x")
    again = read_tensor(tmp_path / "x", tensor.dtype, tensor.shape)
    assert torch.equal(again, tensor.detach().clone()) and not again.requires_grad
    assert (tmp_path / "x").stat().st_size == tensor.numel() * tensor.dtype.itemsize


def test_a_tensor_of_a_data_sets_file_is_what_the_data_set_gives(tmp_path):
    records = write_records(tmp_path / "0.bin", 50, 100)
    (batch,) = GDSDataset(tmp_path, 50, Records("u1", (100,)), shuffle=False, device="cpu")
    assert torch.equal(read_tensor(tmp_path / "0.bin", torch.uint8, (50, 100)), batch)
    assert bytes_of(batch) == records.tobytes()


def test_the_device_of_the_result_is_chosen(tmp_path):
    write_tensor(some_tensor(), tmp_path / "x")
    assert read_tensor(tmp_path / "x", torch.float32, (2, 3, 4)).device.type == "cpu"
    assert read_tensor(tmp_path / "x", torch.float32, (2, 3, 4), device="meta").device.type == "meta"


def test_a_file_url_names_the_file(tmp_path):
    url, tensor = f"file://{tmp_path}/a%20b.bin", torch.arange(3)
    write_tensor(tensor, url)
    assert os.listdir(tmp_path) == ["a b.bin"]
    assert torch.equal(read_tensor(url, torch.int64, (3,)), tensor)
    with gdsdata.Engine() as engine:
        engine.write(url, tensor + 1).result()
        assert torch.equal(engine.read(url, torch.zeros_like(tensor)).result(), tensor + 1)


def test_threads_may_read_and_write_at_once(tmp_path):
    def there_and_back(i: int) -> bool:
        tensor = torch.full((300_001,), i, dtype=torch.int32)
        write_tensor(tensor, tmp_path / f"{i % 8}-{i}")
        return torch.equal(read_tensor(tmp_path / f"{i % 8}-{i}", torch.int32, tensor.shape), tensor)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, range(32)))


# --------------------------------------------------------------------------------------- whole files and parts


def test_a_tensor_without_an_offset_replaces_a_longer_file(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"a" * 1000)
    with open(path, "rb") as reader:
        write_tensor(tensor_of(b"b" * 10), path)
        assert path.read_bytes() == b"b" * 10 and reader.read() == b"a" * 1000
    path.write_bytes(b"a" * 1000)
    with Engine() as engine:
        engine.write(path, tensor_of(b"c" * 10)).result()
    assert path.read_bytes() == b"c" * 10


def test_a_tensor_that_makes_the_whole_file_replaces_it_and_others_write_over_it(tmp_path):
    path = tmp_path / "x"
    write_tensor(tensor_of(b"a" * 1000), path)
    before = path.stat().st_ino
    write_tensor(tensor_of(b"b" * 10), path, 0)
    write_tensor(tensor_of(b"c" * 10), path, 990)
    assert path.stat().st_ino == before and path.read_bytes() == b"b" * 10 + b"a" * 980 + b"c" * 10
    with open(path, "rb") as reader:
        write_tensor(tensor_of(b"d" * 1000), path)
        assert path.stat().st_ino != before and path.read_bytes() == b"d" * 1000
        assert reader.read() == b"b" * 10 + b"a" * 980 + b"c" * 10, "a reader that has it open keeps the old one"


def test_readers_of_a_file_that_is_being_replaced_see_whole_versions_only(tmp_path):
    path = tmp_path / "x"
    write_tensor(torch.zeros(100_000, dtype=torch.int32), path)
    with ThreadPoolExecutor(1) as pool:
        writes = pool.submit(
            lambda: [write_tensor(torch.full((100_000,), i, dtype=torch.int32), path) for i in range(30)]
        )
        seen = set()
        while not writes.done():
            tensor = read_tensor(path, torch.int32, (100_000,))
            assert tensor.min() == tensor.max()
            seen.add(int(tensor[0]))
        writes.result()
    assert len(seen) > 1


def rewrite_for_ever(path: Path, started: Path) -> None:
    version = 0
    while True:
        write_tensor(torch.full((200_000,), version, dtype=torch.int32), path)
        started.touch()
        version += 1


def version_after_a_kill(path: Path, seconds: float) -> tuple[int, int]:
    """Kill a process that keeps rewriting the file. Returns its smallest and largest number."""
    started = path.with_name("started")
    child = os.fork()
    if child == 0:
        rewrite_for_ever(path, started)
    while not started.exists():
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    started.unlink()
    tensor = read_tensor(path, torch.int32, (path.stat().st_size // 4,))
    assert len(tensor) == 200_000
    return int(tensor.min()), int(tensor.max())


@pytest.mark.parametrize("seed", range(12))
def test_a_kill_at_any_moment_leaves_one_whole_version(tmp_path, seed):
    smallest, largest = in_new_process(version_after_a_kill, tmp_path / "x", random.Random(seed).random() * 0.03)
    assert smallest == largest


# ---------------------------------------------------------------------------------------------------------- errors


def test_a_missing_file_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError) as error:
        read_tensor(tmp_path / "absent", torch.uint8, (1,))
    assert f"could not open '{tmp_path}/absent': No such file or directory" in str(error.value)
    assert error.value.errno == errno.ENOENT


@pytest.mark.parametrize("size", [0, 1, 4096, 2 * MIB])
@pytest.mark.parametrize("offset", [0, 1, 4096])
def test_a_file_that_ends_before_the_tensor_is_corrupt(tmp_path, size, offset):
    path = tmp_path / "x"
    path.write_bytes(bytes(size))
    for cold in (False, True):
        if cold:
            drop_cache(path)
        with pytest.raises(CorruptData) as error:
            read_tensor(path, torch.uint8, (size + 1,), offset)
        assert (error.value.path, error.value.offset + error.value.length) == (str(path), offset + size + 1)
        assert f"'{path}' ends at {size} bytes, before offset" in str(error.value)


def error_of_an_offset(path: Path, offset: int) -> str:
    try:
        read_tensor(path, torch.uint8, (16,), offset)
    except (CorruptData, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize("offset", [2 * MIB, 2**40, 2**63 - 16, 2**63 - 1, 2**63, 2**64 - 8, 2**64, 2**70])
def test_an_offset_far_behind_the_end_is_an_error_and_no_crash(tmp_path, offset):
    (tmp_path / "x").write_bytes(bytes(2 * MIB))  # large enough to be mapped
    message = in_new_process(error_of_an_offset, tmp_path / "x", offset)
    assert str(offset) in message and message.startswith(("CorruptData: ", "ValueError: "))


@pytest.mark.parametrize(
    ("do", "words"),
    [
        (lambda path: read_tensor(path, torch.uint8, (1,), offset=-1), "offset=-1"),
        (lambda path: read_tensor(path, torch.uint8, (2, -3)), r"shape=\(2, -3\) must not be negative"),
        (lambda path: read_tensor(path, torch.uint8, (0, 2**63)), r"shape=\(0, 9.*\): torch has no tensor of such"),
        (lambda path: read_tensor(path, torch.uint8, (2**40, 2**40, 0)), "torch has no tensor of such sizes"),
        (lambda path: read_tensor(path.parent, torch.uint8, (1,)), "is not a regular file"),
        (lambda path: read_tensor("/dev/zero", torch.uint8, (1,)), "is not a regular file"),
        (lambda path: write_tensor(torch.zeros(1), path, offset=-1), "offset=-1 must be 0 or more"),
        (lambda path: write_tensor(torch.eye(2).to_sparse(), path), "torch.sparse_coo on cpu has no plain memory"),
        (lambda path: write_tensor(torch.zeros(1, device="meta"), path), "on meta has no plain memory to write"),
        (lambda path: write_tensor(torch._efficientzerotensor(4), path), "zeros .* no memory to write: give its clone"),
    ],
    ids=[
        *("read at a negative offset", "read of a negative size", "read of a size", "read of sizes"),
        *("read of a folder", "read of a device"),
        *("write at a negative offset", "write of a sparse tensor", "write of a meta tensor", "write of zeros"),
    ],
)
def test_a_bad_argument_is_refused_in_words(tmp_path, do, words):
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(ValueError, match=words):
        do(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float32"}, r"dtype='float32' is of type str: give a torch.dtype, as torch.float32"),
        ({"dtype": np.float32}, r"dtype=<class 'numpy.float32'> is of type type: give a torch.dtype"),
        ({"shape": None}, r"shape=None must be whole numbers, as \(3, 224\)"),
        ({"shape": (3.0,)}, r"shape=\(3.0,\) must be whole numbers"),
        ({"shape": True}, r"shape=True must be whole numbers"),
        ({"shape": (3, True)}, r"shape=\(3, True\) must be whole numbers"),
        ({"shape": "3"}, r"shape='3' must be whole numbers"),
        ({"offset": 4.0}, "offset=4.0 must be a whole number"),
        ({"offset": True}, "offset=True must be a whole number"),
        ({"path": 3}, r"path=3 is of type int: give a str or an os.PathLike"),
    ],
)
def test_an_argument_of_another_type_is_refused_in_words(tmp_path, arguments, words):
    write_tensor(torch.zeros(3), tmp_path / "x")
    given = {"path": tmp_path / "x", "dtype": torch.float32, "shape": (3,)} | arguments
    with pytest.raises(TypeError, match=f"^{words}"):
        read_tensor(**given)


@pytest.mark.parametrize(
    ("path", "offset", "words"),
    [
        ("x", 4.0, "offset=4.0 must be a whole number"),
        ("x", "4", "offset='4' must be a whole number"),
        (3, 0, "path=3 is of type int: give a str or an os.PathLike"),
    ],
)
def test_a_path_or_offset_of_another_type_is_refused_in_words(tmp_path, monkeypatch, path, offset, words):
    monkeypatch.chdir(tmp_path)
    tensor = torch.zeros(3)
    write_tensor(tensor, "x")
    with gdsdata.Engine() as engine:
        for call in (
            lambda: engine.read(path, tensor, offset),
            lambda: engine.write(path, tensor, offset),
            lambda: write_tensor(tensor, path, offset),
        ):
            with pytest.raises(TypeError, match=f"^{words}"):
                call()
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("make", [int, np.int64, lambda size: [size], lambda size: np.array([size])])
def test_whole_numbers_of_any_type_are_a_shape(tmp_path, make):
    write_tensor(torch.arange(4), os.fsencode(tmp_path / "x"))
    assert read_tensor(os.fsencode(tmp_path / "x"), torch.int64, make(3), np.int64(8)).tolist() == [1, 2, 3]


def test_a_name_that_is_not_utf_8_is_a_name(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    tensor, into = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    write_tensor(tensor, name)
    assert torch.equal(read_tensor(os.fsencode(name), torch.int64, 4), tensor)
    with gdsdata.Engine() as engine:
        engine.write(name, tensor + 1).result()
        engine.write(name, tensor[:1], 8).result()
        assert engine.read(name, into).result().tolist() == [1, 0, 3, 4]
    for suffix in (".pt", ".safetensors"):
        gdsdata.save({"a": tensor}, name + suffix)
        assert torch.equal(gdsdata.load(name + suffix)["a"], tensor)
    with pytest.raises(CorruptData) as error:
        read_tensor(name, torch.int64, 5)
    assert error.value.path == name and f"'{name}' ends at 32 bytes" in str(error.value)


def test_a_name_with_a_nul_is_refused_and_the_file_before_it_stays(tmp_path):
    (tmp_path / "x").write_bytes(b"old")
    name = f"{tmp_path}/x\0y"
    with gdsdata.Engine() as engine:
        for call in (
            lambda: write_tensor(torch.zeros(4), name),
            lambda: write_tensor(torch.zeros(4), name, 1),
            lambda: read_tensor(name, torch.uint8, 1),
            lambda: engine.read(name, torch.zeros(1)).result(),
            lambda: engine.write(name, torch.zeros(1)).result(),
            lambda: gdsdata.save({"a": torch.zeros(4)}, name),
            lambda: gdsdata.load(name),
        ):
            with pytest.raises(ValueError, match=r"x\\x00y' contains a NUL, and no path may"):
                call()
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize(("name", "number"), [("", errno.ENOENT), ("x" * 300, errno.ENAMETOOLONG)])
def test_a_name_that_no_file_can_have_is_refused_before_bytes_are_written(tmp_path, monkeypatch, name, number):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: write_tensor(torch.zeros(4), name),
        lambda: gdsdata.save({"a": torch.zeros(4)}, name),
    ):
        with pytest.raises(OSError, match=f"^(\\[Errno 2\\] )?could not create '{name}': ") as error:
            call()
        assert error.value.errno == number
    assert os.listdir(tmp_path) == []


def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    for offset in (0, 5):
        with pytest.raises(FileNotFoundError) as error:
            write_tensor(some_tensor(), tmp_path / "absent" / "x", offset)
        assert f"{tmp_path}/absent" in str(error.value)
        assert "after the data set was made" not in str(error.value), "there is no data set here"


def test_a_folder_is_not_replaced_by_a_tensor(tmp_path):
    (tmp_path / "x").mkdir()
    for tensor in (some_tensor(), torch.zeros(MIB)):
        with pytest.raises(IoError, match="Is a directory") as error:
            write_tensor(tensor, tmp_path / "x")
        assert error.value.errno == errno.EISDIR
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").is_dir()


def error_of_a_limited_write(folder: Path, offset: int | None) -> tuple[Exception, bytes]:
    """Write 2 MiB where files may grow to 1 MiB. The error needs neither root nor a full disk."""
    (folder / "x").write_bytes(b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    try:
        write_tensor(torch.zeros(2 * MIB, dtype=torch.uint8), folder / "x", offset)
    except Exception as error:
        return error, (folder / "x").read_bytes()[:3]
    raise AssertionError("it was written")


@pytest.mark.parametrize("offset", [None, 3])
def test_a_write_that_fails_is_an_io_error_and_leaves_no_temporary(tmp_path, offset):
    error, left = in_new_process(error_of_a_limited_write, tmp_path, offset)
    assert isinstance(error, IoError) and error.errno == errno.EFBIG
    assert str(tmp_path / "x") in str(error) and error.path.startswith(str(tmp_path))
    assert "File too large; raise the limit of file sizes (ulimit -f)" in str(error)
    assert os.listdir(tmp_path) == ["x"] and left == b"old"


@pytest.fixture
def one_mebibyte(tmp_path):
    """Mount a file system of 1 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("mounting a small tmpfs takes root, and a container that permits it")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("offset", [None, 0, 1, 4096])
def test_a_full_disk_is_an_io_error_and_a_file_to_be_replaced_is_untouched(one_mebibyte, offset):
    old = random_bytes(300_000)
    (one_mebibyte / "x").write_bytes(old)
    with pytest.raises(IoError) as error:
        write_tensor(torch.zeros(2 * MIB, dtype=torch.uint8), one_mebibyte / "x", offset)
    assert error.value.errno == errno.ENOSPC and f"{one_mebibyte}/x" in str(error.value)
    assert "No space left on device; free space on the file system or choose another" in str(error.value)
    assert os.listdir(one_mebibyte) == ["x"]
    if offset is None:
        assert (one_mebibyte / "x").read_bytes() == old
    os.truncate(one_mebibyte / "x", 0)
    write_tensor(torch.ones(1000), one_mebibyte / "x")  # works again as soon as there is room
    assert (one_mebibyte / "x").stat().st_size == 4000


def error_of_a_write_without_permission(folder: Path) -> Exception:
    (folder / "x").write_bytes(b"old")
    if os.geteuid() == 0:
        for parent in [folder, *list(folder.parents)[:2]]:
            parent.chmod(0o755)
        os.seteuid(65534)
    else:
        folder.chmod(0o555)
    try:
        write_tensor(some_tensor(), folder / "x")
    except Exception as error:
        return error
    finally:
        if os.getuid() != 0:
            folder.chmod(0o755)
    raise AssertionError("it was written")


def test_a_write_without_permission_is_an_io_error(tmp_path):
    error = in_new_process(error_of_a_write_without_permission, tmp_path)
    assert isinstance(error, IoError) and error.errno == errno.EACCES
    assert "Permission denied; check the permissions of the file and its folders" in str(error)
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


# ------------------------------------------------------------------------------------------------ new memory


def prefers_huge_pages(address: int) -> bool:
    """Return whether /proc/self/smaps says that the address's mapping asks for huge pages."""
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_there = int(found[1], 16) <= address < int(found[2], 16)
        elif is_there and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"{address:x} is not mapped")


@pytest.mark.skipif(not os.path.exists("/sys/kernel/mm/transparent_hugepage"), reason="the kernel has no huge pages")
def test_new_memory_is_of_huge_pages(tmp_path):
    path, size = tmp_path / "a.bin", 8 * MIB
    path.write_bytes(random_bytes(size))
    tensor = read_tensor(path, torch.uint8, [size])
    gdsdata.save({"a": tensor}, tmp_path / "a.pt")
    gdsdata.save({"a": tensor}, tmp_path / "a.safetensors")
    read = [tensor, *(gdsdata.load(tmp_path / name)["a"] for name in ("a.pt", "a.safetensors"))]
    for one in read:
        assert prefers_huge_pages(one.data_ptr() + size // 2) and torch.equal(one, tensor)
