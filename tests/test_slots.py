"""Small batches for a GPU share a slot of the ring, and their values are those of separate slots.

On a GPU, and over the fake driver.
"""

import fake_gpu
import numpy as np
import pytest
import torch
from helpers import exit_code_of_fork, grouped, in_new_process, write_records

from gdsdata import EngineOptions, GDSDataset
from gdsdata.data.batches import ring
from gdsdata.data.batches.ring import RingReader, batches_in_slot
from gdsdata.errors import CorruptData, EngineClosed
from gdsdata.formats import Records

RECORD_BYTES, FILES, RECORDS_OF_FILE, BATCH = 4096, 8, 17, 2
BATCHES = FILES * RECORDS_OF_FILE // BATCH


def write_files(folder):
    """Write the files, and return all records: uint8 (FILES * RECORDS_OF_FILE, RECORD_BYTES)."""
    return np.concatenate([write_records(folder / f"{i}.bin", RECORDS_OF_FILE, RECORD_BYTES) + 0 for i in range(FILES)])


def read(folder, device, batch_size=BATCH, **arguments):
    form = Records("u1", (RECORD_BYTES,))
    arguments = dict(shuffle=False, options=EngineOptions(workers=2, calibrate=False)) | arguments
    return GDSDataset(f"{folder}/*.bin", batch_size, form, device=device, **grouped(arguments))


def in_slot(dataset):
    return batches_in_slot(dataset._samples.index, dataset._samples.settings)


def an_epoch_with_a_replaced_file(device, folder):
    """Return whether each batch before the error was right, its file, and how many are counted."""
    records = write_files(folder)
    dataset = read(folder, device)
    assert in_slot(dataset) == BATCHES // 4
    batches = iter(dataset)  # reads the first few ahead
    (folder / "5.bin").write_bytes(bytes((RECORDS_OF_FILE + 1) * RECORD_BYTES))
    right, error = [], None
    try:
        for i, batch in enumerate(batches):
            right.append(np.array_equal(batch.cpu().numpy(), records[i * BATCH : (i + 1) * BATCH]))
    except CorruptData as raised:
        error = raised.path
    return right, error, dataset.stats()["batches"]


def check_an_epoch_with_a_replaced_file(right, error, counted, folder):
    sound = 5 * RECORDS_OF_FILE // BATCH  # the next batch has a record of the file
    assert right == [True] * sound
    assert error == f"{folder}/5.bin"
    assert counted == sound


def whole_epochs(device, folder, batch_size):
    """Return whether they share, whether all were right, their sizes, and how many count."""
    records = write_files(folder)
    dataset = read(folder, device, batch_size)
    epochs = [[batch.cpu().numpy() for batch in dataset] for _ in range(2)]
    right = all(np.array_equal(np.concatenate(epoch), records) for epoch in epochs)
    return in_slot(dataset) > 1, right, [len(batch) for batch in epochs[0]], dataset.stats()["batches"]


def check_whole_epochs(share, right, sizes, counted, batch_size):
    whole, rest = divmod(FILES * RECORDS_OF_FILE, batch_size)
    assert share and right
    assert sizes == [batch_size] * whole + [rest] * (rest > 0)
    assert counted == 2 * len(sizes)


def what_a_forked_child_gets(device, folder):
    """Return the exit code of a child that takes a batch, and how many the parent has after it."""
    write_files(folder)
    batches = iter(read(folder, device))
    next(batches)  # others of its slot are here already

    def child():
        with pytest.raises(EngineClosed, match="an iterator does not work in its forked child"):
            next(batches)

    return exit_code_of_fork(child), sum(1 for _ in batches)


def of_fake_gpu(driver, function, *arguments):
    fake_gpu.wait_for_copies(fake_gpu.install(driver))
    return function(fake_gpu.DEVICE, *arguments)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batches_of_slots_come_in_order_and_are_counted_one_by_one(tmp_path, fake_driver, batch_size):
    found = in_new_process(of_fake_gpu, fake_driver, whole_epochs, tmp_path, batch_size)
    check_whole_epochs(*found, batch_size)


def test_an_error_in_a_slot_comes_at_its_own_batch(tmp_path, fake_driver):
    found = in_new_process(of_fake_gpu, fake_driver, an_epoch_with_a_replaced_file, tmp_path)
    check_an_epoch_with_a_replaced_file(*found, tmp_path)


def test_a_forked_child_gets_none_of_the_batches_of_a_slot(tmp_path, fake_driver):
    assert in_new_process(of_fake_gpu, fake_driver, what_a_forked_child_gets, tmp_path) == (0, BATCHES - 1)


def test_batches_for_the_processor_share_none(tmp_path):
    write_files(tmp_path)
    assert in_slot(read(tmp_path, "cpu")) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_on_a_gpu_batches_of_slots_come_in_order_and_are_counted_one_by_one(tmp_path, batch_size):
    check_whole_epochs(*whole_epochs("cuda", tmp_path, batch_size), batch_size)


@pytest.mark.gpu
def test_on_a_gpu_an_error_in_a_slot_comes_at_its_own_batch(tmp_path):
    check_an_epoch_with_a_replaced_file(*an_epoch_with_a_replaced_file("cuda", tmp_path), tmp_path)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_on_a_gpu_a_forked_child_gets_none_of_the_batches_of_a_slot(tmp_path):
    assert in_new_process(what_a_forked_child_gets, "cuda", tmp_path) == (0, BATCHES - 1)


@pytest.mark.gpu
def test_samples_that_may_be_left_out_share_no_slot(tmp_path):
    write_files(tmp_path)
    assert in_slot(read(tmp_path, "cuda", on_error="skip")) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("zero_copy", [False, True])
def test_batches_of_a_slot_may_be_taken_on_any_stream(tmp_path, zero_copy):
    records = write_files(tmp_path)
    streams = [torch.cuda.Stream() for _ in range(3)]
    dataset, sums, batches = read(tmp_path, "cuda", zero_copy=zero_copy), [], iter([])
    for epoch in range(20):
        dataset.set_epoch(epoch)
        batches = iter(dataset)
        for i in range(BATCHES):
            with torch.cuda.stream(streams[i % 3]):
                torch.cuda._sleep(20_000)  # the stream is behind when it gets the batch, and when that is dropped
                batch = next(batches)
                sums.append(batch.sum(dtype=torch.int64))
                del batch
    torch.cuda.synchronize()
    expected = records.reshape(BATCHES, -1).sum(1, dtype=np.int64).tolist() * 20
    assert [int(one) for one in sums] == expected


@pytest.mark.gpu
def test_a_batch_may_be_changed_while_another_of_its_slot_is_needed_for_a_backward_pass(tmp_path):
    records = write_files(tmp_path)
    weights = torch.ones(256, 4, device="cuda", requires_grad=True)
    first, second, *_ = read(tmp_path, "cuda")
    loss = torch.nn.functional.embedding(first.to(torch.int64), weights).sum()
    products = (weights[:, 0].sum() * first).sum()
    second.add_(1)
    (loss + products).backward()
    assert np.array_equal(first.cpu().numpy(), records[:BATCH])
    assert np.array_equal(second.cpu().numpy(), records[BATCH : 2 * BATCH] + np.uint8(1))


@pytest.mark.parametrize("batches, planned", [(4, [4]), (20, [4, 8])])
def test_the_second_plan_is_made_before_the_first_batch_is_waited_for(tmp_path, monkeypatch, batches, planned):
    write_records(tmp_path / "0.bin", batches * BATCH, RECORD_BYTES)
    so_far: list[int] = []
    before_first: list[int] = []
    plan, taking = RingReader.plan_in_order, ring._taking

    def noted_plan(reader, order, epoch, steps):
        so_far.append(len(steps))
        plan(reader, order, epoch, steps)

    def noted_taking(*arguments):
        take = taking(*arguments)
        return lambda: before_first.extend(so_far) or take()

    monkeypatch.setattr(RingReader, "plan_in_order", noted_plan)
    monkeypatch.setattr(ring, "_taking", noted_taking)
    next(iter(read(tmp_path, "cpu")))
    assert before_first == planned
