"""Injected and real faults: the right bytes, or the right exception at its batch, and no signal."""

import ctypes
import errno
import io
import os
import pickle
import platform
import shutil
import struct
import tarfile
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    BACKENDS,
    MIB,
    REFUSES_DIRECT,
    arrays,
    assert_same_batches,
    drop_cache,
    grouped,
    in_new_process,
    needs_uring,
    random_bytes,
    refuses_direct,
    require_direct,
    warm_cache,
    write_records,
)
from torch.utils.data import DataLoader

from gdsdata import EngineOptions, GDSDataset, Reading, load, save, write_tensor
from gdsdata.errors import BackendUnavailable, CorruptData, IoError, StallError
from gdsdata.formats import Npy, Records, Tar, Tokens
from gdsdata.io.engine import shared_engine

pytestmark = pytest.mark.usefixtures("quick_programs")

RECORD_BYTES = 4099
BATCH = 8
RECORDS = Records("u1", (RECORD_BYTES,))


@pytest.fixture
def records(tmp_path) -> np.ndarray:
    """Write 200 records in two files in tmp_path: 25 batches."""
    return np.concatenate([write_records(tmp_path / f"{i}.bin", 100, RECORD_BYTES, seed=i) for i in range(2)])


def read(source: Path, options: EngineOptions | None = None, **arguments) -> GDSDataset:
    return GDSDataset(
        source,
        BATCH,
        RECORDS,
        **grouped({"options": options, "shuffle": False, "device": "cpu", **arguments}),
    )


def batches_of(records: np.ndarray) -> list[np.ndarray]:
    return [records[i : i + BATCH] for i in range(0, len(records), BATCH)]


def until_error(batches, expected: type[Exception]) -> tuple[list[np.ndarray], Exception]:
    """Return the batches before the error, and the error."""
    got = []
    with pytest.raises(expected) as error:
        for batch in batches:
            got.append(batch.numpy().copy())
    return got, error.value


# -------------------------------------------------------------------------------- faults that must not be noticed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("direct", ["never", "always"])
@pytest.mark.parametrize(
    "faults",
    [
        "shorten=0.9",
        "interrupt=0.5",
        "late=0.5,late_ms=3",
        "reorder=1",
        "shorten=0.7,interrupt=0.3,late=0.2,late_ms=2,reorder=0.5",
    ],
)
def test_short_interrupted_late_and_reordered_transfers_give_right_bytes_in_order(
    tmp_path, records, backend, direct, faults
):
    if direct == "always":
        require_direct(tmp_path / "0.bin")
    options = EngineOptions(backend=backend, direct=direct, workers=2, coalesce_gap_bytes=0, faults=f"seed=1,{faults}")
    dataset, undisturbed = read(tmp_path, options, shuffle=True, prefetch=3), read(tmp_path, shuffle=True)
    for _ in range(3):
        drop_cache(*tmp_path.iterdir())  # cached bytes would not pass through the backend
        assert_same_batches(dataset, undisturbed)
    if direct == "always":
        assert dataset.stats()["engine"]["requests"] > 3 * 25


@pytest.mark.parametrize("backend", BACKENDS)
def test_short_and_interrupted_transfers_of_converted_tokens_give_right_values(tmp_path, backend):
    (tmp_path / "0.bin").write_bytes(random_bytes(400_001 * 2))
    options = EngineOptions(backend=backend, direct="auto", faults="seed=2,shorten=0.8,interrupt=0.3")
    shaky = GDSDataset(tmp_path, 5, Tokens(">u2", seq_len=333), device="cpu", reading=Reading(options=options))
    drop_cache(tmp_path / "0.bin")
    assert_same_batches(shaky, GDSDataset(tmp_path, 5, Tokens(">u2", seq_len=333), device="cpu"))


# ------------------------------------------------------------------------- one completion in turn becomes an error

# Records bypass the page cache, so each passes through the backend of the one worker, which counts
# completions.
ONE_BY_ONE = dict(direct="always", workers=1, coalesce_gap_bytes=0, segment_bytes=4096)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("number", [0, 1, 2, 5, 8, 11, 16, 17, 24, 31])
def test_a_failed_completion_is_an_error_at_its_batch_and_the_next_epoch_works(tmp_path, backend, number):
    # A record is longer than a segment, so each record is a request of its own.
    expected = write_records(tmp_path / "0.bin", 64, 8192)
    require_direct(tmp_path / "0.bin")
    options = EngineOptions(**ONE_BY_ONE, backend=backend, faults=f"fail_at={number}")
    engine = shared_engine(options, torch.device("cpu"))  # keeps the engine, whose backends count their completions
    dataset = GDSDataset(
        tmp_path, 4, Records("u1", (8192,)), shuffle=False, device="cpu", reading=Reading(options=options)
    )
    got, error = until_error(dataset, IoError)

    assert error.errno == errno.EIO and error.path == str(tmp_path / "0.bin")
    assert error.length > 0 and error.offset // (4 * 8192) == len(got), (
        "the error names a place in the batch that raised it"
    )
    assert "a fault made on purpose" in str(error) and error.path in str(error)
    assert f"offset {error.offset}, length {error.length} bytes" in str(error)
    assert_same_batches(got, np.split(expected, 16)[: len(got)])
    assert engine.statistics()["errors"] == 1
    assert_same_batches(dataset, np.split(expected, 16))


def first_failure(folder: Path, number: int) -> OSError:
    """Return the error of a read that ends in errno ``number``."""
    dataset = read(folder, EngineOptions(backend="posix", direct="never", faults=f"fail=1,error={number}"))
    if not drop_cache(*folder.iterdir()):
        pytest.skip("this file system keeps files in memory")
    got, error = until_error(dataset, OSError)
    assert got == []
    return error


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EIO, "Input/output error; the device reported a failure, see the kernel's log"),
        (errno.ESTALE, "Stale file handle"),
        (errno.EACCES, "Permission denied; check the permissions of the file and its folders"),
    ],
)
def test_the_errno_of_a_failure_is_that_of_the_system(tmp_path, records, number, words):
    error = first_failure(tmp_path, number)
    assert isinstance(error, IoError) and error.errno == number and words in str(error)


def test_an_error_crosses_processes_with_its_path_offset_and_length(tmp_path, records):
    error = first_failure(tmp_path, errno.EIO)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error)) and again.errno == error.errno


def test_a_state_taken_at_an_error_continues_with_the_failed_batch(tmp_path, records):
    require_direct(tmp_path / "0.bin")
    options = EngineOptions(**ONE_BY_ONE, backend="posix", faults="fail_at=30")
    engine = shared_engine(options, torch.device("cpu"))
    dataset = read(tmp_path, options)
    got, _ = until_error(dataset, IoError)
    dataset.load_state_dict(dataset.state_dict())
    assert 0 < len(got) < 25 and engine.statistics()["errors"] == 1
    assert_same_batches([*got, *arrays(dataset)], batches_of(records))


# ----------------------------------------------------------------------------------------------------- real faults


def test_writing_a_tensor_over_a_file_that_is_being_read_leaves_the_reader_its_old_bytes(tmp_path, records):
    batches = iter(read(tmp_path / "0.bin", prefetch=1))
    got = arrays([next(batches)])
    write_tensor(torch.zeros(100 * RECORD_BYTES, dtype=torch.uint8), tmp_path / "0.bin")
    assert_same_batches([*got, *arrays(batches)], batches_of(records[:100]))


def test_a_file_truncated_before_it_is_read_is_corrupt(tmp_path, records):
    dataset = read(tmp_path)
    os.truncate(tmp_path / "1.bin", 50 * RECORD_BYTES + 7)
    got, error = until_error(dataset, CorruptData)
    assert error.path == str(tmp_path / "1.bin") and error.offset // RECORD_BYTES in range(100) and error.length > 0
    assert f"{100 * RECORD_BYTES} bytes then, {50 * RECORD_BYTES + 7} bytes now" in str(error)
    assert_same_batches(got, batches_of(records)[:12])
    with pytest.raises(CorruptData, match="behind 50 records of 4099 bytes, 7 bytes are left"):
        next(iter(dataset))


def test_a_file_replaced_by_another_is_refused_and_then_indexed_anew(tmp_path, records):
    dataset = read(tmp_path)
    others = write_records(tmp_path / "other", 60, RECORD_BYTES, seed=7)
    os.replace(tmp_path / "other", tmp_path / "1.bin")
    got, error = until_error(dataset, CorruptData)
    assert error.path == str(tmp_path / "1.bin")
    assert "was replaced or changed since it was indexed" in str(error)
    assert "iterate again to index it anew" in str(error)
    assert_same_batches(got, batches_of(records)[:12])
    assert_same_batches(dataset, batches_of(np.concatenate([records[:100], others])))
    assert len(dataset) == 20


def test_a_file_replaced_by_one_of_equal_size_is_noticed(tmp_path, records):
    dataset = read(tmp_path)
    write_records(tmp_path / "other", 100, RECORD_BYTES, seed=7)
    os.replace(tmp_path / "other", tmp_path / "0.bin")
    with pytest.raises(CorruptData, match="was replaced or changed since it was indexed: .*modified later"):
        next(iter(dataset))


def test_a_file_replaced_while_it_is_being_read_is_read_to_its_end(tmp_path, records):
    dataset = read(tmp_path, prefetch=1)
    batches = iter(dataset)
    got = arrays(next(batches) for _ in range(14))  # both files are open
    for path in tmp_path.glob("*.bin"):
        write_records(tmp_path / "other", 100, RECORD_BYTES, seed=7)
        os.replace(tmp_path / "other", path)
    assert_same_batches([*got, *arrays(batches)], batches_of(records))


def write_tar(path: Path, member_bytes: int) -> None:
    with tarfile.open(path, "w") as archive:
        for i in range(20):
            member = tarfile.TarInfo(f"{i:02}.bin")
            member.size = member_bytes
            archive.addfile(member, io.BytesIO(random_bytes(member_bytes, i)))


@pytest.mark.parametrize(
    ("name", "format", "write"),
    [
        ("a.bin", RECORDS, lambda path, version: write_records(path, 20 + version, RECORD_BYTES, version)),
        ("a.npy", Npy(), lambda path, version: np.save(path, np.full(1000, version))),
        ("a.tar", Tar(index_cache=None), lambda path, version: write_tar(path, 700 + 800 * version)),
    ],
)
def test_a_file_rewritten_in_place_between_epochs_is_refused_and_then_indexed_anew(tmp_path, name, format, write):
    path = tmp_path / name
    write(path, 0)
    dataset = GDSDataset(tmp_path, 4, format, shuffle=False, device="cpu")
    before, inode = samples_of(dataset), path.stat().st_ino
    write(path, 1)
    assert path.stat().st_ino == inode
    with pytest.raises(CorruptData, match="was replaced or changed since it was indexed") as error:
        list(dataset)
    assert error.value.path == str(path)
    after = samples_of(dataset)
    assert after == samples_of(GDSDataset(tmp_path, 4, format, shuffle=False, device="cpu")) != before


def samples_of(batches) -> list[bytes]:
    samples = [sample for batch in batches for sample in (batch["bin"] if isinstance(batch, dict) else batch)]
    return [sample.numpy().tobytes() for sample in samples]


def test_a_persistent_worker_refuses_a_file_rewritten_in_place_and_then_indexes_it_anew(tmp_path, records):
    arguments = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
    batches = DataLoader(read(tmp_path), persistent_workers=True, **arguments)
    assert_same_batches(batches, batches_of(records))
    others = write_records(tmp_path / "1.bin", 100, RECORD_BYTES, seed=7)
    with pytest.raises(CorruptData, match=r"1\.bin' was replaced or changed since it was indexed"):
        list(batches)
    assert_same_batches(batches, batches_of(np.concatenate([records[:100], others])))


@pytest.mark.parametrize("when", ["before the first epoch", "before the second epoch"])
def test_a_file_unlinked_before_its_first_read_is_not_found(tmp_path, records, when):
    dataset = read(tmp_path)
    if when == "before the second epoch":
        arrays(dataset)
        dataset = pickle.loads(pickle.dumps(dataset))  # as in another process: no file is open
    os.unlink(tmp_path / "1.bin")
    got, error = until_error(dataset, FileNotFoundError)
    assert str(tmp_path / "1.bin") in str(error)
    assert "was it, or its folder, moved or deleted?" in str(error)
    assert error.errno == errno.ENOENT
    assert_same_batches(got, batches_of(records)[:12])
    with pytest.raises(FileNotFoundError):
        next(iter(dataset))
    write_records(tmp_path / "1.bin", 100, RECORD_BYTES, seed=1)
    assert_same_batches(dataset, batches_of(records))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("record_bytes", [4096, 4099, 65536, 65537])
@pytest.mark.parametrize("left_bytes", [0, 1, 4096 * 300, 4096 * 300 + 11])
def test_a_file_truncated_while_it_is_iterated_is_corrupt_at_the_batch_that_lacks_bytes(
    tmp_path, backend, record_bytes, left_bytes
):
    count = 4 * MIB // record_bytes
    expected = write_records(tmp_path / "0.bin", count, record_bytes)
    warm_cache(tmp_path / "0.bin")
    options = EngineOptions(backend=backend)
    dataset = GDSDataset(
        tmp_path,
        1,
        Records("u1", (record_bytes,)),
        shuffle=False,
        device="cpu",
        reading=Reading(prefetch=2, options=options),
    )
    batches = iter(dataset)
    first = arrays(next(batches) for _ in range(4))
    time.sleep(0.1)  # the two batches ahead are complete, and small records were copied from a mapping
    os.truncate(tmp_path / "0.bin", left_bytes)
    got, error = until_error(batches, CorruptData)

    whole = max(left_bytes // record_bytes, 6)
    assert len(first) + len(got) == whole
    assert_same_batches([*first, *got], expected[:whole, None])
    assert error.path == str(tmp_path / "0.bin")
    assert error.offset // record_bytes == whole and error.length <= record_bytes
    assert f"ends at {left_bytes} bytes, before offset" in str(error) and "it was truncated" in str(error)


@pytest.mark.parametrize("attempt", range(10))
def test_batches_before_a_truncation_are_delivered_though_others_find_the_end(tmp_path, attempt):
    # Many workers share a mapping. Only some see the lost part; the others have right bytes.
    expected = write_records(tmp_path / "0.bin", 256, 65536)
    options = EngineOptions(backend="posix", workers=8)
    batches = iter(
        GDSDataset(
            tmp_path,
            1,
            Records("u1", (65536,)),
            shuffle=False,
            device="cpu",
            reading=Reading(prefetch=8, options=options),
        )
    )
    first = arrays(next(batches) for _ in range(4))
    os.truncate(tmp_path / "0.bin", 100 * 65536)
    got, error = until_error(batches, CorruptData)
    assert_same_batches([*first, *got], expected[:100, None])
    assert error.offset == 100 * 65536


def epochs_ended_by_a_truncation(folder: Path) -> int:
    """Count the epochs of 20 that end in `CorruptData`: their file is truncated at random."""
    path, corrupt = folder / "0.bin", 0
    data = random_bytes(4 * MIB)
    known = {data[i : i + 4096] for i in range(0, len(data), 4096)}
    for attempt in range(20):
        path.write_bytes(data)
        dataset = GDSDataset(path, 16, Records("u1", (4096,)), seed=attempt, device="cpu")
        child = os.fork()
        if child == 0:
            time.sleep(attempt * 1e-4)
            os.truncate(path, 8192 * attempt)
            os._exit(0)
        try:
            for batch in dataset:
                assert all(row.tobytes() in known for row in batch.numpy())
        except CorruptData:
            corrupt += 1
        os.waitpid(child, 0)
    return corrupt


def test_a_truncation_at_any_moment_is_never_a_signal_nor_wrong_bytes(tmp_path):
    assert in_new_process(epochs_ended_by_a_truncation, tmp_path) > 0


def test_a_mapping_that_lost_pages_says_nothing_about_files_read_later(tmp_path):
    write_records(tmp_path / "0.bin", 1024, 4096)
    batches = iter(
        GDSDataset(tmp_path, 1, Records("u1", (4096,)), shuffle=False, device="cpu", reading=Reading(prefetch=1))
    )
    next(batches)
    os.truncate(tmp_path / "0.bin", 0)
    until_error(batches, CorruptData)
    expected = write_records(tmp_path / "0.bin", 1024, 4096, seed=3)
    dataset = GDSDataset(tmp_path, 64, Records("u1", (4096,)), shuffle=False, device="cpu")
    assert_same_batches(dataset, np.split(expected, 16))


# ----------------------------------------------------------------------------------------------------- permissions

# Root may read everything, so these run as nobody, in a folder that nobody may enter.


@pytest.fixture
def open_folder():
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def as_nobody() -> None:
    if os.geteuid() == 0:
        os.seteuid(65534)


def error_without_permission(folder: Path) -> Exception:
    write_records(folder / "0.bin", 10, RECORD_BYTES)
    dataset = read(folder)
    (folder / "0.bin").chmod(0)
    as_nobody()
    try:
        arrays(dataset)
    except Exception as error:
        return error
    raise AssertionError("the file could be read")


def test_a_file_whose_permission_was_removed_is_an_io_error(open_folder):
    error = in_new_process(error_without_permission, open_folder)
    assert isinstance(error, IoError) and error.errno == errno.EACCES
    assert error.path == str(open_folder / "0.bin") and error.length > 0
    assert "Permission denied; check the permissions of the file and its folders" in str(error)


def error_of_indexing_without_permission(folder: Path, closed: str) -> Exception:
    write_records(folder / "0.bin", 10, RECORD_BYTES)
    (folder / closed).chmod(0)
    as_nobody()
    try:
        read(folder)
    except Exception as error:
        return error
    raise AssertionError("it could be read")


def test_a_file_that_may_not_be_read_is_an_io_error_when_it_is_indexed(open_folder):
    error = in_new_process(error_of_indexing_without_permission, open_folder, "0.bin")
    assert isinstance(error, IoError) and error.errno == errno.EACCES
    assert error.path == str(open_folder / "0.bin") and "Permission denied" in str(error)


def test_a_folder_that_may_not_be_read_is_an_io_error(open_folder):
    error = in_new_process(error_of_indexing_without_permission, open_folder, ".")
    assert isinstance(error, IoError) and error.errno == errno.EACCES
    assert error.path == str(open_folder) and "Permission denied" in str(error)


def routes_of_another_users_file(path: Path, is_warm: bool) -> tuple[np.ndarray, dict[str, int]]:
    (warm_cache if is_warm else drop_cache)(path)
    as_nobody()
    dataset = GDSDataset(path, 64, Records("u1", (4096,)), shuffle=False, device="cpu")
    return np.concatenate(arrays(dataset)), dataset.stats()["bytes"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_file_of_another_user_is_read_from_storage_where_it_is_not_in_memory(open_folder):
    path = open_folder / "0.bin"
    expected = write_records(path, 4096, 4096)
    require_direct(path)
    for is_warm, route in ((False, "direct"), (True, "page_cache")):
        got, served = in_new_process(routes_of_another_users_file, path, is_warm)
        assert np.array_equal(got, expected)
        # To look for a page that is not in memory reads it. Few of them are then there in time.
        assert served[route] > 0.8 * expected.nbytes, (is_warm, served)


# -------------------------------------------------------------------------------------------- O_DIRECT is refused


@pytest.fixture
def refusing() -> Path:
    """Return a file whose file system refuses O_DIRECT."""
    if not os.access(REFUSES_DIRECT, os.R_OK) or not refuses_direct(REFUSES_DIRECT):
        pytest.skip(f"{REFUSES_DIRECT} is not there, not readable, or allows O_DIRECT")
    return REFUSES_DIRECT


def epochs_of_a_refusing_file(path: Path, options: EngineOptions) -> tuple[str, dict, list[str]]:
    """Read two epochs. Returns "right", "wrong" or the error; the bytes by route; the warnings."""
    header_bytes = path.stat().st_size % 4096
    records = Records("u1", (4096,), header_bytes)
    dataset = GDSDataset(path, 64, records, shuffle=False, device="cpu", reading=Reading(options=options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got = [b"".join(batch.tobytes() for batch in arrays(dataset)) for _ in range(2)]
            outcome = "right" if got == [path.read_bytes()[header_bytes:]] * 2 else "wrong"
        except BackendUnavailable as error:
            assert error.reasons == (str(error),)
            outcome = str(error)
    return outcome, dataset.stats()["bytes"], [str(warning.message) for warning in caught]


@pytest.mark.parametrize("backend", BACKENDS)
def test_where_o_direct_is_refused_bytes_come_through_the_page_cache_with_one_warning(refusing, backend):
    outcome, served, warned = in_new_process(epochs_of_a_refusing_file, refusing, EngineOptions(backend=backend))
    assert outcome == "right" and served["direct"] == 0 and served["buffered"] > 0
    (warning,) = warned
    assert "gdsdata: O_DIRECT was refused, so bytes go through the page cache" in warning and str(refusing) in warning


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asked", [dict(direct="always"), dict(strict=True)], ids=str)
def test_where_o_direct_is_refused_and_was_asked_for_the_error_says_so(refusing, backend, asked):
    options = EngineOptions(backend=backend, **asked)
    outcome, served, warned = in_new_process(epochs_of_a_refusing_file, refusing, options)
    assert f"O_DIRECT was asked for, but the file system of '{refusing}' refuses it" in outcome
    assert 'use direct="auto" without strict, or a file system that allows it' in outcome
    assert sum(served.values()) == 0 and warned == [], "no read went through the page cache, so no warning says so"


def test_direct_never_asks_for_no_o_direct_and_warns_of_nothing(refusing):
    outcome, served, warned = in_new_process(epochs_of_a_refusing_file, refusing, EngineOptions(direct="never"))
    assert outcome == "right" and served["direct"] == 0 and warned == []


# -------------------------------------------------------------------------------------------- io_uring is refused


SETUP, ENTER, REGISTER = 425, 426, 427  # io_uring's system calls, everywhere


def forbid_io_uring(call: int = SETUP, error: int = errno.EPERM) -> None:
    """Refuse a system call for good, as a container's seccomp profile does."""
    load_number, if_equal, answer = 0x20, 0x15, 0x06  # BPF: load a word, jump if equal, return
    refused, allowed = 0x00050000 | error, 0x7FFF0000
    steps = [(load_number, 0, 0, 0), (if_equal, 0, 1, call), (answer, 0, 0, refused), (answer, 0, 0, allowed)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HP", len(steps), ctypes.addressof(code)))
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((no_new_privileges, 1, 0, 0, 0), (set_seccomp, filter_mode, ctypes.byref(program))):
        assert libc.prctl(*arguments) == 0, os.strerror(ctypes.get_errno())


def epoch_without_io_uring(
    folder: Path, options: EngineOptions, *forbidden: int
) -> tuple[list[np.ndarray], str, list[str]]:
    """Return an epoch's batches, backend and warnings; or none, the error and its reasons."""
    forbid_io_uring(*forbidden)
    dataset = read(folder, options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return arrays(dataset), dataset.stats()["engine"]["backend"], [str(warning.message) for warning in caught]
        except BackendUnavailable as error:
            return [], str(error), list(error.reasons)


def test_where_io_uring_is_forbidden_posix_serves_with_one_warning(tmp_path, records):
    got, backend, (warning,) = in_new_process(epoch_without_io_uring, tmp_path, EngineOptions())
    assert_same_batches(got, batches_of(records))
    assert backend == "posix"
    assert "io_uring: Operation not permitted; forbidden by /proc/sys/kernel/io_uring_disabled or by" in warning


@needs_uring
@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOSYS])
def test_where_a_ring_may_be_made_and_not_used_posix_serves_with_one_warning(tmp_path, records, refusal):
    options = EngineOptions(direct="always")  # nothing comes out of the page cache
    got, backend, (warning,) = in_new_process(epoch_without_io_uring, tmp_path, options, ENTER, refusal)
    assert_same_batches(got, batches_of(records))
    assert backend == "posix" and f"io_uring: {os.strerror(refusal)}; " in warning and "seccomp profile" in warning


@needs_uring
def test_where_a_ring_does_not_say_that_it_can_write_posix_serves_with_one_warning(tmp_path, records):
    got, backend, (warning,) = in_new_process(epoch_without_io_uring, tmp_path, EngineOptions(), REGISTER, errno.ENOSYS)
    assert_same_batches(got, batches_of(records))
    assert backend == "posix" and "a ring can be made, but does not say that it reads and writes" in warning


@pytest.mark.parametrize("asked", [dict(backend="uring"), dict(strict=True)], ids=str)
def test_where_io_uring_is_forbidden_and_was_asked_for_the_error_says_so(tmp_path, records, asked):
    _, message, reasons = in_new_process(epoch_without_io_uring, tmp_path, EngineOptions(**asked))
    assert "io_uring: Operation not permitted; forbidden by" in message and reasons == [message]


@needs_uring
def test_strict_is_satisfied_where_nothing_is_refused(tmp_path, records):
    require_direct(tmp_path / "0.bin")
    dataset = read(tmp_path, EngineOptions(strict=True))
    drop_cache(*tmp_path.iterdir())
    assert_same_batches(dataset, batches_of(records))
    assert dataset.stats()["engine"]["backend"] == "uring"


# --------------------------------------------------------------------------------------------- preadv2 is forbidden


PREADV2 = {"x86_64": 327, "aarch64": 286}


def load_and_read_without_preadv2(path: Path, volume: Path, refusal: int) -> tuple[np.ndarray, np.ndarray, dict]:
    forbid_io_uring(PREADV2[platform.machine()], refusal)
    dataset = GDSDataset(volume, 1, device="cpu")
    (batch,) = arrays(dataset)
    return load(path)["a"].numpy(), batch, dataset.stats()["bytes"]


@pytest.mark.skipif(platform.machine() not in PREADV2, reason="the number of preadv2 is not known here")
@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOSYS])
def test_where_preadv2_is_forbidden_files_in_memory_are_read_from_there(tmp_path, refusal):
    path, volume, values = tmp_path / "a.pt", tmp_path / "a.npy", np.arange(30_000)
    save({"a": torch.from_numpy(values)}, path)
    np.save(volume, values)
    warm_cache(path, volume)
    loaded, batch, served = in_new_process(load_and_read_without_preadv2, path, volume, refusal)
    assert np.array_equal(loaded, values) and np.array_equal(batch[0], values)
    assert served["page_cache"] == values.nbytes, served


# ---------------------------------------------------------------------------------------------------------- stalls


@pytest.fixture
def volumes(tmp_path) -> list[np.ndarray]:
    """Write six npy files in tmp_path, of one request each, that are not in the page cache."""
    paths = [tmp_path / f"{i}.npy" for i in range(6)]
    for i, path in enumerate(paths):
        np.save(path, np.full(1000, i))
    if not drop_cache(*paths):
        pytest.skip("this file system keeps files in memory")
    return [np.full((1, 1000), i) for i in range(6)]


def read_volumes(folder: Path, **options) -> GDSDataset:
    options = EngineOptions(direct="never", workers=1, **options)
    dataset = GDSDataset(folder, 1, Npy(), shuffle=False, device="cpu", reading=Reading(prefetch=1, options=options))
    drop_cache(*folder.iterdir())  # indexing has read their headers
    return dataset


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_progress_is_a_stall_error_and_the_next_epoch_works(tmp_path, volumes, backend):
    dataset = read_volumes(tmp_path, backend=backend, stall_timeout_s=0.2, faults="late=1,late_ms=700")
    with pytest.raises(StallError) as error:
        next(iter(dataset))
    assert "no read has ended for 200 ms; the next batch waits for" in str(error.value)
    assert str(tmp_path / "0.npy") in str(error.value) and "stall_timeout_s raises the limit" in str(error.value)
    warm_cache(*tmp_path.iterdir())
    assert_same_batches(dataset, volumes)


# 2**64 nanoseconds and 0.4 ms: it would be a stall at once if it wrapped.
def test_a_stall_timeout_of_centuries_is_no_stall(tmp_path, volumes):
    dataset = read_volumes(tmp_path, backend="posix", stall_timeout_s=18446744073.71, faults="late=1,late_ms=300")
    assert_same_batches(dataset, volumes)


def test_a_stall_error_carries_the_statistics(tmp_path, volumes):
    dataset = read_volumes(tmp_path, backend="posix", stall_timeout_s=0.2, faults="late=1,late_ms=400")
    with pytest.raises(StallError) as error:
        next(iter(dataset))
    statistics = error.value.statistics
    assert statistics.keys() == dataset.stats().keys()
    assert statistics["engine"]["backend"] == "posix" and statistics["batches"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stall_error_does_not_wait_for_storage_that_hangs(tmp_path, volumes, backend):
    batches = iter(read_volumes(tmp_path, backend=backend, stall_timeout_s=0.2, faults="late=1,late_ms=3000"))
    began = time.monotonic()
    with pytest.raises(StallError):
        next(batches)
    assert time.monotonic() - began < 1.5


def test_slow_reads_that_make_progress_are_no_stall(tmp_path, volumes):
    dataset = read_volumes(tmp_path, backend="posix", stall_timeout_s=2.0, faults="late=1,late_ms=400")
    assert_same_batches(dataset, volumes)
    assert dataset.stats()["stall_s"] > 2.0, "together they were slower than the limit"
