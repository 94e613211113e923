"""A consumer's stream waits only for batches that are still being copied (fake CUDA driver)."""

import time

import fake_gpu
from helpers import grouped, in_new_process, write_records

from gdsdata import EngineOptions, GDSDataset
from gdsdata.formats import Records

BATCHES, BATCH_SAMPLES, RECORD_BYTES = 3, 8, 1 << 18


def waits_of_batches(driver, folder, link_bytes_per_s, patience_s):
    """Count the driver's stream waits for batches taken ``patience_s`` after the first."""
    fake = fake_gpu.install(driver)
    fake.fake_cuda_set_link_bytes_per_s(link_bytes_per_s)
    path, form = folder / "records", Records("u1", (RECORD_BYTES,))
    write_records(path, BATCHES * BATCH_SAMPLES, RECORD_BYTES)
    arguments = dict(prefetch=BATCHES, shuffle=False, options=EngineOptions(workers=2, calibrate=False))
    data = GDSDataset(path, BATCH_SAMPLES, form, device=fake_gpu.DEVICE, **grouped(arguments))
    batches = iter(data)
    kept = [next(batches)]
    time.sleep(patience_s)
    before = fake.fake_cuda_calls(b"cuStreamWaitEvent")
    kept += batches
    assert len(kept) == BATCHES
    return fake.fake_cuda_calls(b"cuStreamWaitEvent") - before


def test_a_batch_that_is_there_has_the_stream_wait_for_nothing(tmp_path, fake_driver):
    assert in_new_process(waits_of_batches, fake_driver, tmp_path, 1 << 40, 0.5) == 0


def test_a_batch_on_its_way_has_the_stream_wait_for_each_worker(tmp_path, fake_driver):
    waits = in_new_process(waits_of_batches, fake_driver, tmp_path, 20_000_000, 0)
    assert BATCHES - 1 <= waits <= 2 * 2 * (BATCHES - 1)  # a worker that pauses in a batch has two events
