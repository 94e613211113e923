"""A SIGBUS elsewhere ends the process as without gdsdata, with faulthandler set in any order."""

import faulthandler
import itertools
import mmap
import os
import signal
import tempfile
from pathlib import Path

import pytest
from helpers import MIB, in_new_process, write_records

from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.errors import CorruptData
from gdsdata.formats import Records

RECORD_BYTES, SECONDS = 4096, 20
TRACEBACK = b"Fatal Python error: Bus error"
ORDERS = [order for n in range(1, 5) for order in itertools.product(["read", "enable", "disable"], repeat=n)]


def data_set(path: Path) -> GDSDataset:
    options = EngineOptions(backend="posix", workers=1)
    return GDSDataset(
        path, 64, Records("u1", (RECORD_BYTES,)), shuffle=False, device="cpu", reading=Reading(options=options)
    )


def take(order: tuple[str, ...], dataset: GDSDataset) -> None:
    for step in order:
        if step == "read":
            assert sum(1 for _ in dataset) == len(dataset)
        else:
            {"enable": faulthandler.enable, "disable": faulthandler.disable}[step]()


def touch_a_lost_page() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(2 * mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        file.truncate(mmap.PAGESIZE)
        mapped[mmap.PAGESIZE]


def ended(body) -> tuple[int, bytes]:
    """Return the exit code and standard error of a forked child that calls ``body``."""
    with tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(SECONDS)
                os.dup2(errors.fileno(), 2)
                body()
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        return os.waitstatus_to_exitcode(status), errors.read(MIB)


def ends_of_all_orders(path: Path) -> dict[str, tuple[int, int]]:
    """Return, by order, the exit code and the number of tracebacks."""
    dataset, ends = data_set(path), {}
    for order in ORDERS:
        code, errors = ended(lambda order=order: (take(order, dataset), touch_a_lost_page()))
        ends[" ".join(order)] = (code, errors.count(TRACEBACK))
    return ends


@pytest.mark.timeout(240)
def test_a_bus_error_elsewhere_is_reported_once_and_ends_the_process_in_every_order(tmp_path):
    write_records(tmp_path / "a.bin", 512, RECORD_BYTES)
    ends = in_new_process(ends_of_all_orders, tmp_path / "a.bin", timeout_s=200)
    expected = {}
    for order in ORDERS:
        enabled = next((step == "enable" for step in reversed(order) if step != "read"), False)
        expected[" ".join(order)] = (-signal.SIGBUS, int(enabled))
    assert ends == expected


def read_what_is_lost(order: tuple[str, ...], path: Path) -> None:
    dataset = data_set(path)
    take(order, dataset)
    batches = iter(dataset)
    next(batches)
    os.truncate(path, 300 * RECORD_BYTES)
    with pytest.raises(CorruptData):
        list(batches)


def ends_of_all_reads(path: Path) -> dict[str, tuple[int, bytes]]:
    ends = {}
    for order in ORDERS:
        if len(order) < 4:
            os.truncate(path, 512 * RECORD_BYTES)
            ends[" ".join(order)] = ended(lambda order=order: read_what_is_lost(order, path))
    return ends


@pytest.mark.timeout(240)
def test_a_file_truncated_while_it_is_read_is_an_error_in_every_order(tmp_path):
    write_records(tmp_path / "a.bin", 512, RECORD_BYTES)
    ends = in_new_process(ends_of_all_reads, tmp_path / "a.bin", timeout_s=200)
    assert {order: end for order, end in ends.items() if end[0] != 0} == {}
