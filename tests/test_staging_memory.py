"""Staging memory is made in advance, within its bound, and never in a save's way."""

import ctypes
import threading
from pathlib import Path

import fake_gpu
import numpy as np
import pytest
import torch
from helpers import MIB, eventually, in_new_process

from gdsdata.checkpoint.background import save_job, staging_memory
from gdsdata.checkpoint.background.file_saves import FileSaves
from gdsdata.checkpoint.background.staging_memory import Staging
from gdsdata.checkpoint.file_writer import FileWriter
from gdsdata.errors import DeviceError
from gdsdata.io import engine
from gdsdata.io.memory import paged_memory, pinned_memory
from gdsdata.io.options import EngineOptions

GPU = torch.device("cuda:0")
NEVER = bool  # a function that returns False


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(staging_memory, "_PIECE_BYTES", MIB)
    monkeypatch.setattr(staging_memory, "_PAUSES_PER_BUFFER", 0.0)
    monkeypatch.setattr(engine, "_warned", set())


@pytest.fixture
def pinned(monkeypatch):
    """Pinned memory is plain memory here. Returns the threads that made a buffer each."""
    made: list[str] = []

    def pin(size_bytes, device):
        assert device == GPU
        made.append(threading.current_thread().name)
        return paged_memory(size_bytes, 0)

    monkeypatch.setattr(staging_memory, "pinned_memory", pin)
    return made


class Gate:
    """Blocks a function of `staging_memory` while it is shut."""

    def __init__(self, monkeypatch, name):
        self.opened, self.reached, function = threading.Event(), threading.Semaphore(0), getattr(staging_memory, name)

        def held_up(*arguments):
            self.reached.release()
            assert self.opened.wait(60)
            return function(*arguments)

        monkeypatch.setattr(staging_memory, name, held_up)


def is_idle(staging: Staging) -> bool:
    return staging._makers == 0


def in_memory_bytes(memory: torch.Tensor) -> int:
    """Return how many bytes of this memory have pages."""
    pages = ctypes.create_string_buffer(memory.nbytes // 4096)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), pages) == 0
    return 4096 * sum(page & 1 for page in pages.raw)


def prepared(staging: Staging, size_bytes: int, device: torch.device | None = None) -> int:
    """Prepare, and return how many buffers there are then."""
    staging.prepare(size_bytes, device)
    assert eventually(lambda: is_idle(staging))
    return len(staging._spare)


def take(staging: Staging) -> torch.Tensor:
    buffer = staging.take(NEVER, lambda: pytest.fail("no buffer is in use"))
    assert buffer is not None and buffer.nbytes == staging.piece_bytes and buffer.data_ptr() % 4096 == 0
    return buffer


def test_buffers_are_made_before_they_are_needed_and_then_used(monkeypatch):
    staging = Staging(64 * MIB)
    assert prepared(staging, 5 * MIB + 1) == 6 and staging.size_bytes == 6 * MIB
    with monkeypatch.context() as patched:
        patched.setattr(staging_memory, "paged_memory", lambda *_: pytest.fail("there are enough"))
        buffers = [take(staging) for _ in range(6)]
    assert len({buffer.data_ptr() for buffer in buffers}) == 6
    take(staging)
    assert staging.size_bytes == 7 * MIB


def test_only_the_bytes_of_the_state_are_touched(monkeypatch):
    touched = []
    monkeypatch.setattr(staging_memory, "paged_memory", lambda *sizes: touched.append(sizes) or paged_memory(*sizes))
    assert prepared(Staging(64 * MIB), 4 * MIB + 4096) == 5
    assert touched == 4 * [(MIB, MIB)] + [(MIB, 4096)]


def test_a_tiny_state_on_the_cpu_is_not_prepared_for():
    assert prepared(Staging(64 * MIB), 1000) == 0


def test_preparing_again_adds_only_what_is_lacking():
    staging = Staging(64 * MIB)
    assert prepared(staging, 5 * MIB) == 5
    assert prepared(staging, 3 * MIB) == 5
    take(staging)
    assert prepared(staging, 7 * MIB) == 6 and staging.size_bytes == 7 * MIB


def test_no_more_is_prepared_than_the_bound_and_half_of_the_memory_that_is_left(monkeypatch):
    assert prepared(Staging(4 * MIB), 100 * MIB) == 4
    assert prepared(Staging(4096), 100 * MIB) == 1
    monkeypatch.setattr(staging_memory, "share_bytes", lambda: 3 * MIB)
    assert prepared(Staging(64 * MIB), 100 * MIB) == 3


def test_a_save_beside_a_preparation_on_the_cpu_makes_its_own_buffers_within_the_bound(monkeypatch):
    staging, gate = Staging(4 * MIB), Gate(monkeypatch, "paged_memory")
    staging.prepare(4 * MIB, None)
    assert gate.reached.acquire(timeout=60)
    monkeypatch.setattr(staging_memory, "paged_memory", paged_memory)
    staging.expect(4 * MIB, None)
    held = [take(staging) for _ in range(3)]
    assert staging.size_bytes == 4 * MIB
    gate.opened.set()
    assert eventually(lambda: is_idle(staging))
    held.append(take(staging))
    assert staging.size_bytes == 4 * MIB and not staging._spare


def test_a_save_beside_a_preparation_on_a_gpu_waits_for_the_buffers_in_progress(pinned, monkeypatch):
    staging, gate = Staging(4 * MIB), Gate(monkeypatch, "pinned_memory")
    monkeypatch.setattr(staging_memory, "usable_cores", lambda: 2)
    staging.prepare(4 * MIB, GPU)
    assert gate.reached.acquire(timeout=60)
    taken = []
    saving = threading.Thread(
        target=lambda: (staging.expect(4 * MIB, GPU), taken.extend(take(staging) for _ in "1234"))
    )
    saving.start()
    assert gate.reached.acquire(timeout=60), "another thread makes a buffer at the same time"
    gate.opened.set()
    saving.join(60)
    assert len(taken) == 4 == len(pinned) and staging.size_bytes == 4 * MIB


def test_a_save_without_preparation_has_several_threads_make_pinned_buffers(pinned, monkeypatch):
    monkeypatch.setattr(staging_memory, "usable_cores", lambda: 64)
    gate = Gate(monkeypatch, "pinned_memory")
    staging = Staging(64 * MIB)
    staging.expect(30 * MIB, GPU)
    for _ in range(8):
        assert gate.reached.acquire(timeout=60)
    gate.opened.set()
    assert len({buffer.data_ptr() for buffer in [take(staging) for _ in range(30)]}) == 30
    assert eventually(lambda: is_idle(staging)) and staging.size_bytes == 30 * MIB
    assert not staging._hurries, "a later preparation is slow again"


def test_a_save_that_nobody_waits_for_makes_its_pinned_buffers_one_by_one(pinned):
    staging = Staging(64 * MIB)
    staging.expect(3 * MIB, GPU, hurries=False)
    assert is_idle(staging) and len([take(staging) for _ in range(3)]) == 3
    assert set(pinned) == {threading.current_thread().name}


def test_a_later_save_uses_the_buffers_that_are_there(pinned):
    staging = Staging(64 * MIB)
    prepared(staging, 3 * MIB, GPU)
    for _ in range(2):
        staging.expect(3 * MIB, GPU)
        for buffer in [take(staging) for _ in range(3)]:
            staging.release(buffer)
    assert staging.size_bytes == 3 * MIB and len(pinned) == 3


def test_a_preparation_pauses_after_each_buffer(pinned, monkeypatch):
    monkeypatch.setattr(staging_memory, "_PAUSES_PER_BUFFER", 1e9)
    staging = Staging(64 * MIB)
    staging.prepare(3 * MIB, GPU)
    assert eventually(lambda: len(staging._spare) == 1) and not is_idle(staging)
    staging.expect(3 * MIB, GPU)  # ends the pause
    assert eventually(lambda: len(staging._spare) == 3)


def test_closing_ends_a_preparation_and_frees_what_it_made(monkeypatch):
    staging, gate = Staging(64 * MIB), Gate(monkeypatch, "paged_memory")
    staging.prepare(50 * MIB, None)
    assert gate.reached.acquire(timeout=60)
    threading.Timer(0.05, gate.opened.set).start()
    staging.close()
    assert is_idle(staging) and staging.size_bytes == 0 and not staging._spare
    assert prepared(staging, 5 * MIB) == 0


def test_a_closed_preparation_does_not_pause_to_its_end(pinned, monkeypatch):
    monkeypatch.setattr(staging_memory, "_PAUSES_PER_BUFFER", 1e9)
    staging = Staging(64 * MIB)
    staging.prepare(3 * MIB, GPU)
    assert eventually(lambda: len(staging._spare) == 1)
    staging.close()
    assert is_idle(staging) and staging.size_bytes == 0


def test_buffers_that_are_not_pinned_are_freed_when_a_state_is_on_a_gpu(pinned):
    staging = Staging(4 * MIB)
    prepared(staging, 4 * MIB)
    plain = take(staging)
    staging.expect(3 * MIB, GPU)
    held = [take(staging) for _ in range(3)]
    assert eventually(lambda: is_idle(staging)) and staging.size_bytes == 4 * MIB and len(pinned) == 3
    staging.release(plain)
    assert staging.size_bytes == 3 * MIB
    for buffer in held:
        staging.release(buffer)
    assert len(staging._spare) == 3


def test_a_plain_buffer_that_is_ready_after_a_state_on_a_gpu_came_is_not_used(pinned, monkeypatch):
    staging, gate = Staging(4 * MIB), Gate(monkeypatch, "paged_memory")
    staging.prepare(MIB, None)
    assert gate.reached.acquire(timeout=60)
    monkeypatch.setattr(staging_memory, "paged_memory", paged_memory)
    assert staging.prepare(2 * MIB, GPU) is None
    gate.opened.set()
    assert eventually(lambda: is_idle(staging)) and len(staging._spare) == 2 == len(pinned)


def test_memory_that_cannot_be_made_is_a_warning_in_advance_and_later_an_error(monkeypatch):
    def fail(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(staging_memory, "paged_memory", fail)
    staging = Staging(64 * MIB)
    with pytest.warns(RuntimeWarning, match=r"could not be made in advance \(no memory\)"):
        assert prepared(staging, 5 * MIB) == 0
    with pytest.raises(MemoryError):
        take(staging)
    assert staging.size_bytes == 0
    monkeypatch.setattr(staging_memory, "paged_memory", paged_memory)
    take(staging)
    assert prepared(staging, 5 * MIB) == 4


def test_memory_that_the_driver_does_not_register_is_pinned_by_torch(monkeypatch):
    def fail(*_):
        raise DeviceError("no")

    empty, asked = torch.empty, []

    def empty_of_torch(size, dtype, pin_memory):
        asked.append(pin_memory)
        return empty(size, dtype=dtype)

    monkeypatch.setattr(staging_memory, "pinned_memory", fail)
    monkeypatch.setattr(torch, "empty", empty_of_torch)
    staging = Staging(64 * MIB)
    assert prepared(staging, 2 * MIB, GPU) == 2 and asked == [True, True]


def test_a_save_without_threads_makes_its_buffers_itself(pinned, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    staging = Staging(64 * MIB)
    staging.prepare(3 * MIB, GPU)
    staging.expect(3 * MIB, GPU)
    assert len([take(staging) for _ in range(3)]) == 3
    assert set(pinned) == {threading.current_thread().name}


@pytest.mark.parametrize(
    ("on_gpu", "on_cpu", "by_gpus"),
    [
        ([MIB, 64 * MIB], [], True),
        ([64 * MIB, 64 * MIB], [4], True),
        ([MIB - 1], [], False),
        ([64 * MIB], [8] * 64, False),
        ([64 * MIB], [64 * MIB], False),
        ([], [64 * MIB], False),
        ([], [], False),
    ],
)
def test_a_state_is_copied_by_gpus_if_nearly_all_is_there_in_long_storages(on_gpu, on_cpu, by_gpus):
    is_on_cpu = np.array([False] * len(on_gpu) + [True] * len(on_cpu), bool)
    assert save_job.is_copied_by_gpus(is_on_cpu, np.array([*on_gpu, *on_cpu], np.int64)) == by_gpus


@pytest.mark.parametrize("by_gpus", [True, False])
def test_writing_begins_at_once_only_if_a_gpu_copies(tmp_path, monkeypatch, by_gpus):
    monkeypatch.setattr(save_job, "is_copied_by_gpus", lambda *_: by_gpus)
    begun, taken = threading.Event(), []
    take, written = Staging.take, FileWriter.write

    def take_slowly(staging, *arguments):
        taken.append(begun.wait(20 if by_gpus else 0.1) if len(taken) == 3 else begun.is_set())
        return take(staging, *arguments)

    def write(writer, extents):
        begun.set()
        return written(writer, extents)

    monkeypatch.setattr(FileWriter, "write", write)
    monkeypatch.setattr(Staging, "take", take_slowly)
    state = torch.randint(256, (4 * MIB,), dtype=torch.uint8)
    saves = FileSaves(str(tmp_path), 64 * MIB, EngineOptions())
    saves.save_tensors([state], b"header", str(tmp_path / "state"))
    saves.close()
    assert len(taken) >= 4 and taken[3] == by_gpus
    assert (tmp_path / "state").read_bytes() == b"header" + state.numpy().tobytes()


# ------------------------------------------------------------------------------------------------ the memory itself


def test_paged_memory_takes_what_was_touched_of_it():
    memory = paged_memory(64 * MIB, 8 * MIB)
    assert in_memory_bytes(memory) == 8 * MIB
    memory[: 8 * MIB].fill_(3)
    engine.touch(memory[4096 : 16 * MIB])
    assert memory[: 8 * MIB].eq(3).all() and memory[8 * MIB : 16 * MIB].eq(0).all()
    assert in_memory_bytes(memory) == 16 * MIB


def registrations_of(driver: Path) -> list[int]:
    """Return how much was pinned with memory in use, with a part of it in use, and with none."""
    fake = fake_gpu.install(driver)
    before = fake.fake_cuda_calls(b"cuMemHostRegister"), fake.fake_cuda_calls(b"cuMemHostUnregister")
    memory = [pinned_memory(3 * MIB, GPU) for _ in range(3)]
    parts = [one[4096:] for one in memory]
    parts[0].fill_(1)
    found = []
    for kept in (memory, parts, []):
        found.append(fake.fake_cuda_calls(b"cuMemHostUnregister") - before[1])
        kept.clear()
    found.append(fake.fake_cuda_calls(b"cuMemHostUnregister") - before[1])
    return [fake.fake_cuda_calls(b"cuMemHostRegister") - before[0], *found]


def test_pinned_memory_is_registered_until_its_last_tensor_is_freed(fake_driver):
    assert in_new_process(registrations_of, fake_driver) == [3, 0, 0, 3, 3]
