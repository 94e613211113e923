"""torch and safetensors read gdsdata's checkpoints. An old one stays until the new is complete."""

import contextlib
import errno
import itertools
import os
import pickle
import shutil
import stat
import subprocess
import zipfile
import zlib

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers import MIB, eventually, in_new_process, peak_bytes, require_direct, reset_peak, run_script
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from test_checkpoint import DEVICES, SAFE_DTYPES, assert_same, awkward, nests, trained, values

import gdsdata
from gdsdata import EngineOptions
from gdsdata.checkpoint import file_writer
from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.torch_zip import zip_layout
from gdsdata.checkpoint.torch_zip.archive import open_archive
from gdsdata.errors import IoError
from gdsdata.formats.parsers import safetensors_header
from gdsdata.io.engine import kept_engine

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    pytest.mark.filterwarnings("ignore:.*quantize|.*nested tensors|TypedStorage is deprecated|Sparse CSR|ComplexHalf"),
]


@pytest.mark.parametrize("state", [trained, awkward, dict, lambda: torch.arange(5), lambda: [1, 2], lambda: None])
def test_torch_reads_what_was_saved_as_if_it_had_saved_it(tmp_path, state):
    state = state()
    gdsdata.save(state, tmp_path / "ours.pt")
    torch.save(state, tmp_path / "torchs.pt")
    for arguments in ({}, {"mmap": True}, {"weights_only": False}):
        found = torch.load(tmp_path / "ours.pt", **arguments)
        expected = torch.load(tmp_path / "torchs.pt", **arguments)
        if isinstance(expected, dict) and "storage" in expected:
            assert bytes(found.pop("storage")) == bytes(expected.pop("storage"))
        assert_same(found, expected)
    if isinstance(state, dict) and "tied" in state:
        found["tied"][0][0, 0] = 1234.5
        assert found["tied"][1][0, 0] == found["views"][1][0, 0] == 1234.5, "stored once"
    again = gdsdata.load(tmp_path / "ours.pt", verify=True)
    if isinstance(again, dict):
        again.pop("storage", None)
    assert_same(again, state if not isinstance(state, dict) else {key: state[key] for key in again})


@given(nests)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_torch_reads_any_nest(tmp_path, state):
    gdsdata.save(state, tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt"), state)
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None, "a checksum differs"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_tensors_of_a_gpu_are_saved_behind_the_work_that_makes_them(tmp_path, name):
    state = {"a": torch.zeros(MIB, device="cuda"), "b": torch.arange(7, device="cuda"), "c": torch.arange(5)}
    torch.cuda._sleep(50_000_000)
    state["a"] += torch.arange(MIB, device="cuda")
    gdsdata.save(state, tmp_path / name)
    found = torch.load(tmp_path / name) if name == "x.pt" else load_file(tmp_path / name)
    assert torch.equal(found["a"].cpu(), torch.arange(MIB).float()) and torch.equal(found["b"].cpu(), torch.arange(7))
    assert torch.equal(found["c"], torch.arange(5))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_tensors_in_neighboring_allocations_of_a_gpu_are_saved(tmp_path, name):
    torch.cuda.empty_cache()
    state = {f"{i:02}": torch.full((8 * MIB,), i, dtype=torch.int64, device="cuda") for i in range(32)}
    starts = sorted(tensor.data_ptr() for tensor in state.values())
    if 64 * MIB not in {after - before for before, after in itertools.pairwise(starts)}:
        pytest.skip("the driver left room between all allocations")
    gdsdata.save(state, tmp_path / name)
    found = torch.load(tmp_path / name) if name == "x.pt" else load_file(tmp_path / name)
    assert all(torch.equal(found[key].to("cuda"), tensor) for key, tensor in state.items())


def test_large_storages_lie_on_whole_pages_and_small_ones_close_together(tmp_path):
    gdsdata.save([torch.zeros(5000), *[torch.zeros(3) for _ in range(100)], torch.zeros(MIB)], tmp_path / "x.pt")
    archive = open_archive(OpenFile(str(tmp_path / "x.pt")))
    records = [archive.records[f"data/{saved.key}"] for saved in archive.storages]
    assert [record.offset % (4096 if record.size_bytes >= 4096 else 64) for record in records] == [0] * 102
    assert os.path.getsize(tmp_path / "x.pt") < sum(record.size_bytes for record in records) + 40_000


PAGE_BYTES = 4096
extent_sizes = st.sampled_from([0, 1, 100, PAGE_BYTES, 3 * PAGE_BYTES, 5000, 70_000, 2 * MIB + 1])
gap_sizes = st.sampled_from([0, 0, 1, 64, 3000, PAGE_BYTES, 2 * PAGE_BYTES + 5, 70_000])


@pytest.mark.parametrize("device", DEVICES)
@given(
    layout=st.lists(st.tuples(gap_sizes, extent_sizes), min_size=1, max_size=20),
    first=st.sampled_from([0, 1, PAGE_BYTES - 1, PAGE_BYTES]),
    batch_bytes=st.sampled_from([1, 100_000, 64 * MIB]),
    said_before=st.booleans(),
)
@example([(0, 5000), (0, 2 * PAGE_BYTES - 5000), (0, PAGE_BYTES)], 0, 64 * MIB, False)  # one ends with its page
@example([(0, PAGE_BYTES), (0, PAGE_BYTES)], 0, 64 * MIB, False)
@settings(max_examples=150, deadline=None)
def test_extents_and_what_lies_between_them_are_in_their_places(
    tmp_path_factory, device, layout, first, batch_bytes, said_before
):
    """Gaps may be written before, between or after the extents that share their pages."""
    path = tmp_path_factory.getbasetemp() / "extents"
    extents, between, expected = [], [(0, b"\1" * first)], bytearray(b"\1" * first)
    for number, (gap, size) in enumerate(layout):
        between.append((len(expected), bytes([2 + number]) * gap))
        expected += between[-1][1]
        content = torch.arange(number, number + size, device=device).to(torch.uint8)
        extents.append((len(expected), content))
        expected += content.cpu().numpy().tobytes()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(file_writer, "_BATCH_BYTES", batch_bytes)
        with file_writer.FileWriter(str(path), len(expected), EngineOptions()) as output:
            if said_before:
                output.write_bytes(between[::2])
            checksums = list(output.write_in_batches(extents))
            output.write_bytes(between[1::2] if said_before else between)
            output.commit()
    assert path.read_bytes() == expected
    assert checksums == [zlib.crc32(content.cpu().numpy().tobytes()) for _, content in extents]


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "dcp"])
def test_tensors_that_share_pages_are_written_in_one_piece(tmp_path, name):
    """Requests are full for tensors of any size, because a disk loses time at each break."""
    (tmp_path / "probe").write_bytes(b"x")
    require_direct(tmp_path / "probe")
    state = {f"{i}": torch.arange(300_001 + i) for i in range(40)}
    size_bytes = sum(tensor.nbytes for tensor in state.values())
    engine = kept_engine(EngineOptions(), torch.device("cpu"))
    before = engine.statistics()
    if name == "dcp":
        dcp.save({"model": state}, storage_writer=gdsdata.GDSStorageWriter(tmp_path / name))
    else:
        gdsdata.save(state, tmp_path / name)
    after = engine.statistics()
    assert after["bytes"]["direct"] - before["bytes"]["direct"] >= size_bytes
    pages = 0 if name == "x.safetensors" else 2 * len(state)  # pages with checksums are written once more
    assert after["requests"] - before["requests"] <= -(-size_bytes // MIB) + 3 + pages


def test_neighbors_on_one_page_do_not_disturb_each_other(tmp_path):
    state = [torch.full((2000 + i,), i, dtype=torch.uint8) for i in range(100)]
    for _ in range(20):
        gdsdata.save(state, tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt"), state)


def test_tensors_of_different_dtypes_on_one_memory_are_refused_as_torch_does(tmp_path):
    base = torch.zeros(8)
    for other in (base.view(torch.int32), base.view(torch.uint32), base.untyped_storage()):
        with pytest.raises(RuntimeError, match="view the same data as different types: save a copy of one"):
            gdsdata.save([base, other], tmp_path / "x.pt")
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle|local"):
        gdsdata.save({"f": lambda: 1}, tmp_path / "x.pt")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ safetensors


@pytest.mark.parametrize("device", DEVICES)
def test_safetensors_reads_what_was_saved(tmp_path, device):
    state = {str(dtype): values(dtype, 5, 3).to(device) for dtype in SAFE_DTYPES}
    state |= {"empty": torch.empty(0, 4, device=device), "scalar": torch.tensor(1.5, device=device)}
    state |= {"long": torch.randn(MIB, device=device), "ü\n": torch.ones(3), "t": torch.randn(4, 5).t()}
    gdsdata.save(state, tmp_path / "x.safetensors")
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == state.keys()
    assert_same(found, {name: state[name].cpu().contiguous() for name in found})
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
    again = gdsdata.load(tmp_path / "x.safetensors", verify=True)
    assert_same(again, {name: state[name].cpu().contiguous() for name in again})
    gdsdata.save({}, tmp_path / "none.safetensors")
    assert load_file(tmp_path / "none.safetensors") == gdsdata.load(tmp_path / "none.safetensors") == {}


def test_a_state_that_safetensors_cannot_hold_is_refused_and_pt_is_offered(tmp_path):
    base = torch.zeros(10)
    for state, words in (
        ({"a": base, "b": base}, "a and b share memory"),
        ({"a": base[:6], "b": base[5:]}, "a and b share memory"),
        ({"a": torch.zeros(3, dtype=torch.complex128)}, "a is of torch.complex128"),
        ({"a": {"b": base}}, "a is of type dict and no plain tensor"),
        ({"a": torch.eye(3).to_sparse()}, "a is a tensor of torch.sparse_coo and no plain tensor"),
        ({"a": torch.nested.nested_tensor([base])}, "a is a nested tensor and no plain tensor"),
        ({"a": torch.quantize_per_tensor(base, 1, 0, torch.qint8)}, "a is a quantized tensor and no plain tensor"),
        ({"a": torch._efficientzerotensor(4)}, "a is a tensor of zeros without memory and no plain tensor"),
        ({"a": np.ones(3)}, r"a is an array of numpy and no plain tensor.*give torch.from_numpy\(array\), or"),
        ({"a": 3}, "a is of type int and no plain tensor"),
        ({3: base}, "3 is no name for a tensor"),
        ({"half \ud800": base}, r"'half \\ud800' is no name for a tensor"),
        ([base], "a dict of tensors, and no list"),
    ):
        with pytest.raises(ValueError, match=f"{words}.*.pt file"):
            gdsdata.save(state, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="^a is on the meta device and has no values to save: leave it out"):
        gdsdata.save({"a": torch.zeros(3, device="meta")}, tmp_path / "x.safetensors")
    assert list(tmp_path.iterdir()) == []
    gdsdata.save({"a": base[:5], "b": base[5:]}, tmp_path / "x.safetensors")


# ------------------------------------------------------------------------------------------------ the old and the new


def test_a_header_that_no_reader_accepts_is_refused_before_the_old_file_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "LONGEST_HEADER_BYTES", 8192)
    path, state = tmp_path / "x.safetensors", {f"layer.{i}": torch.tensor([float(i)]) for i in range(40)}
    gdsdata.save(state, path)
    many = {f"layer.{i}": torch.tensor([float(i)]) for i in range(100)}
    with pytest.raises(ValueError, match=r"x\.safetensors: .* of 100 tensors .* accept 8192: save them to a \.pt file"):
        gdsdata.save(many, path)
    assert gdsdata.load(path, verify=True) == state


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_the_file_is_replaced_whole_with_the_mode_of_the_umask(tmp_path, name):
    umask = os.umask(0o027)
    try:
        gdsdata.save({"a": torch.zeros(5)}, tmp_path / name)
        gdsdata.save({"a": torch.ones(70_000)}, tmp_path / name)
    finally:
        os.umask(umask)
    assert gdsdata.load(tmp_path / name)["a"].sum() == 70_000
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_file_is_the_same_whether_it_is_written_in_one_go_or_in_many(tmp_path, monkeypatch, name, device):
    sizes = [0, 1, 5000, 3, 70_000, 1024, 1023, 200_001, 7, 4096]
    state = {f"{i}": torch.randint(256, (size,), dtype=torch.uint8, device=device) for i, size in enumerate(sizes)}
    gdsdata.save(state, tmp_path / name)
    monkeypatch.setattr(file_writer, "_BATCH_BYTES", 1000)
    gdsdata.save(state, tmp_path / f"many-{name}")
    assert (tmp_path / f"many-{name}").read_bytes() == (tmp_path / name).read_bytes()


def test_a_long_pickle_is_written_whole(tmp_path):
    state = {"values": list(range(1_000_000)), "a": torch.arange(5000)}
    gdsdata.save(state, tmp_path / "x.pt")
    assert os.path.getsize(tmp_path / "x.pt") > 4 * MIB
    found = torch.load(tmp_path / "x.pt")
    assert found["values"] == state["values"] and torch.equal(found["a"], state["a"])
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None, "a checksum differs"


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
@pytest.mark.whole_end
def test_a_program_that_ends_can_save(tmp_path, name):
    code = f"""
import atexit, torch, gdsdata
state = {{"a": torch.arange(50_000_000), "b": torch.arange(7)}}
atexit.register(gdsdata.save, state, {str(tmp_path / name)!r})
"""
    assert run_script(code) == (0, "", "")
    found = gdsdata.load(tmp_path / name, verify=True)
    assert torch.equal(found["a"], torch.arange(50_000_000)) and torch.equal(found["b"], torch.arange(7))


@pytest.mark.whole_end
def test_a_program_that_ends_can_load_in_many_batches(tmp_path):
    gdsdata.save({"a": torch.arange(5000), "b": torch.arange(7)}, tmp_path / "x.pt")
    code = f"""
import atexit, gdsdata
from gdsdata.checkpoint import tensor_reader
tensor_reader._BATCH_BYTES = 10
atexit.register(lambda: print(sum(int(one.sum()) for one in gdsdata.load({str(tmp_path / "x.pt")!r}).values())))
"""
    assert run_script(code) == (0, f"{5000 * 4999 // 2 + 21}\n", "")


@pytest.mark.parametrize("batch_bytes", [64 * MIB, 500_000])
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, name, batch_bytes):
    monkeypatch.setattr(file_writer, "_BATCH_BYTES", batch_bytes)
    gdsdata.save({"a": torch.zeros(5)}, tmp_path / name)
    before = (tmp_path / name).read_bytes()
    options = EngineOptions(workers=2, faults="seed=1,fail=0.3")
    with pytest.raises(IoError):
        for _ in range(20):
            gdsdata.save({f"{i}": torch.ones(100_000) for i in range(20)}, tmp_path / name, options=options)
    assert (tmp_path / name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(FileNotFoundError):
        gdsdata.save({"a": torch.zeros(5)}, tmp_path / "absent" / name)


@contextlib.contextmanager
def disk_of(size, folder):
    """Mount a file system of that size."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        # The file that was replaced last is closed after its save; until then umount fails.
        assert eventually(lambda: subprocess.run(["umount", folder], capture_output=True).returncode == 0, 30)


@pytest.fixture
def small_disk(tmp_path):
    with disk_of("1m", tmp_path / "small") as folder:
        yield folder


def test_a_disk_with_room_for_two_takes_one_after_the_other(tmp_path):
    state = {"a": torch.ones(17 << 20)}  # 68 MiB
    with disk_of("150m", tmp_path / "disk") as folder:
        for i in range(6):
            state["a"][0] = i
            gdsdata.save(state, folder / "x.pt")
        assert gdsdata.load(folder / "x.pt")["a"][0] == 5


def test_a_save_closes_the_file_that_it_replaces(tmp_path):
    state = {"a": torch.ones(17 << 20)}
    gdsdata.save(state, tmp_path / "x.pt")
    descriptors = set(os.listdir("/proc/self/fd"))
    gdsdata.save(state, tmp_path / "x.pt")
    assert eventually(lambda: set(os.listdir("/proc/self/fd")) <= descriptors, 10)


def test_a_write_that_the_kernel_cancels_names_the_limit_of_processes(tmp_path):
    """io_uring gives some writes to threads of the kernel, which count as the user's."""
    options = EngineOptions(faults=f"fail=1,error={errno.ECANCELED}")
    with pytest.raises(IoError, match="Operation canceled; the kernel could not start a thread.*ulimit -u"):
        gdsdata.save({"a": torch.ones(MIB)}, tmp_path / "x.pt", options=options)


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_a_disk_without_room_is_an_error_before_the_first_byte(small_disk, name):
    gdsdata.save({"a": torch.ones(100_000)}, small_disk / name)
    before = (small_disk / name).read_bytes()
    with pytest.raises(IoError, match="reserve space") as caught:
        gdsdata.save({"a": torch.zeros(200_000)}, small_disk / name)
    assert caught.value.errno == errno.ENOSPC
    assert (small_disk / name).read_bytes() == before
    assert [path.name for path in small_disk.iterdir()] == [name]
    (small_disk / name).unlink()
    assert eventually(lambda: shutil.disk_usage(small_disk).free > 900_000)  # a thread closes the file
    gdsdata.save({"a": torch.zeros(200_000)}, small_disk / name)


# ------------------------------------------------------------------------------------------------ memory


def _extra_memory(folder, name):
    """Measure the memory of a save and a load beside a state of 256 MiB.

    The page cache is bypassed, because its pages would count too.
    """
    options = EngineOptions(workers=2, bounce_bytes=4 * MIB, direct="always")
    state = {f"{i}": torch.ones(MIB) for i in range(64)}
    extra = []
    for call in (gdsdata.save, lambda state, path, options: gdsdata.load(path, into=state, options=options)):
        before = reset_peak() or peak_bytes()
        call(state, folder / name, options=options)
        extra.append(peak_bytes() - before)
    return extra


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_saving_and_loading_take_no_more_memory_than_is_stated(tmp_path, name):
    (tmp_path / "x").write_bytes(b"x")
    require_direct(tmp_path / "x")
    bounce = 2 * 4 * MIB
    for extra in in_new_process(_extra_memory, tmp_path, name):
        assert extra < bounce + 8 * MIB  # the slack is for new threads and modules


# ------------------------------------------------------------------------------------------------ zip


def test_records_of_four_gib_and_more_are_found_where_they_are(tmp_path):
    sizes = [10, 5 << 30, 0, (4 << 30) - 1, 77]  # a file with holes
    placed = zip_layout.place([(f"archive/{i}", size, 4096) for i, size in enumerate(sizes)])
    contents = [bytes([65 + i]) * (size if size < 100 else 10) for i, size in enumerate(sizes)]
    checksums = [zlib.crc32(content) for content in contents]
    with open(tmp_path / "x.zip", "wb") as file:
        for record, content, crc32 in zip(placed, contents, checksums, strict=True):
            file.seek(record.header_offset)
            file.write(record.header(crc32) + content)
            assert record.offset % 4096 == 0
        file.seek(placed[-1].end)
        file.write(zip_layout.directory(placed, checksums))
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        entries = archive.infolist()
        assert [entry.file_size for entry in entries] == sizes
        assert [entry.CRC for entry in entries] == checksums
        for i in (0, 2, 4):
            assert archive.read(f"archive/{i}") == contents[i]
        with archive.open("archive/1") as long:
            assert long.read(10) == contents[1]


@pytest.mark.parametrize("count", [1, 3, 0xFFFE, 0xFFFF])
@pytest.mark.parametrize("size", [7, 2**32 - 2, 2**32 - 1, 5 << 30])
def test_how_long_a_directory_will_be_is_known_before_it_is_made(count, size):
    placed = zip_layout.place([("archive/data/ä", size, 64), *[(f"archive/{i}", 1, 64) for i in range(count - 1)]])
    entries_bytes = sum(record.entry_bytes for record in placed)
    end_bytes = zip_layout.end_bytes(placed[-1].end, count, entries_bytes)
    assert entries_bytes + end_bytes == len(zip_layout.directory(placed, [0] * count))


@pytest.mark.slow
def test_many_records_are_found(tmp_path):
    gdsdata.save([torch.tensor(float(i)) for i in range(66_000)], tmp_path / "x.pt")
    assert np.array_equal(torch.stack(gdsdata.load(tmp_path / "x.pt")).numpy(), np.arange(66_000, dtype=np.float32))
    assert torch.load(tmp_path / "x.pt")[65_999] == 65_999
