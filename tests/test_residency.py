"""Batches that a GPU gathers from registered page cache (fake CUDA driver)."""

import fake_gpu
import torch
from helpers import eventually, in_new_process, write_records

from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.formats import Records

RECORDS, RECORD_BYTES, FILES, EPOCHS = 200, 1000, 2, 3


def epochs_of_a_pinned_data_set(driver, folder, batch_size):
    """Return whether each epoch has the batches of the CPU, and how many bytes were gathered."""
    paths = [folder / f"{i}" for i in range(FILES)]
    for path in paths:
        write_records(path, RECORDS, RECORD_BYTES)

    def read(device, residency):
        reading = Reading(EngineOptions(workers=2, calibrate=False), residency=residency)
        return GDSDataset(paths, batch_size, Records("u1", (RECORD_BYTES,)), seed=1, device=device, reading=reading)

    def epochs_of(data):
        for epoch in range(1, EPOCHS + 1):
            data.set_epoch(epoch)
            yield torch.cat(list(data))

    expected = list(epochs_of(read("cpu", None)))
    fake = fake_gpu.install(driver)
    fake.fake_cuda_set_one_address(1)
    fake_gpu.wait_for_copies(fake)
    pinned = read(fake_gpu.DEVICE, "pinned")
    list(pinned)
    assert eventually(lambda: pinned.stats()["residency"]["ready"]), pinned.stats()["residency"]
    before = pinned.stats()["bytes"]["pinned_page_cache"]
    same = [torch.equal(*both) for both in zip(epochs_of(pinned), expected, strict=True)]
    return same, pinned.stats()["bytes"]["pinned_page_cache"] - before


def test_every_epoch_is_gathered_in_slots_of_any_number_of_batches(tmp_path, fake_driver):
    for batch_size in (1, 3, 64, FILES * RECORDS):
        same, gathered_bytes = in_new_process(epochs_of_a_pinned_data_set, fake_driver, tmp_path, batch_size)
        assert same == [True] * EPOCHS, batch_size
        assert gathered_bytes == EPOCHS * FILES * RECORDS * RECORD_BYTES, batch_size
