"""GDSDataset feeds DALI's pipelines the same bytes from memory that lives as long as needed."""

import gc
import weakref

import numpy as np
import pytest
import torch
from helpers import write_records
from test_images import encoded, photo, photos_on, pixels

from gdsdata import GDSDataset
from gdsdata.formats import Records
from gdsdata.integrations import dali


def pipeline(outputs, device_id=None, **arguments):
    """Make a DALI pipeline with the outputs ``outputs(fn)``, or skip the test without DALI."""
    nvidia = pytest.importorskip("nvidia.dali", reason="DALI is not installed (nvidia-dali-cuda130)")
    pipe = nvidia.Pipeline(batch_size=8, num_threads=2, device_id=device_id, **arguments)
    with pipe:
        pipe.set_outputs(*outputs(nvidia.fn))
    return pipe


def decoder_of_dali(fn, contents, device):
    """Decode images with DALI, or skip the test if its codecs are not installed."""
    pytest.importorskip("nvidia.nvimgcodec", reason="DALI's codecs are not installed (nvidia-nvimgcodec-cu13)")
    return fn.decoders.image(contents, device=device)


def epoch(pipe):
    """Return each output's samples of an epoch as arrays, and reset the pipeline for the next."""
    samples = None
    with pytest.raises(StopIteration):
        while True:
            outputs = [output.as_cpu() for output in pipe.run()]
            samples = samples or [[] for _ in outputs]
            for values, output in zip(samples, outputs, strict=True):
                values.extend(np.array(output[i]) for i in range(len(output)))
    pipe.reset()
    return samples


@pytest.mark.parametrize("decode", [None, "encoded"], ids=["bytes as they lie", "encoded"])
def test_dali_decodes_what_the_files_hold_epoch_after_epoch(tmp_path, decode):
    photos = [photo(20 + i, 30, seed=i) for i in range(20)]
    source = dali.source(photos_on("cpu", tmp_path, [encoded(one, "PNG") for one in photos], decode), ["jpg", "number"])

    def outputs(fn):
        contents, numbers = fn.external_source(source, num_outputs=2, batch=True, no_copy=True)
        return decoder_of_dali(fn, contents, "cpu"), numbers

    pipe = pipeline(outputs)
    for _ in range(3):
        images, numbers = epoch(pipe)
        assert [int(one) for one in numbers] == list(range(20))
        for image, one in zip(images, photos, strict=True):
            assert np.array_equal(image, pixels(one).permute(1, 2, 0).numpy())


def test_dali_reads_encoded_images_where_the_engine_put_them(tmp_path):
    contents, ours, seen = [encoded(photo(seed=i)) for i in range(24)], [], []

    def note(batch):
        ours.extend((one.data_ptr(), one.numel()) for one in batch["jpg"])
        return batch

    source = dali.source(photos_on("cpu", tmp_path, contents, "encoded", transform=note), "jpg")

    def look(content):
        seen.append((content.ctypes.data, content.nbytes))
        return content.copy()

    pipe = pipeline(lambda fn: [fn.python_function(fn.external_source(source, no_copy=True), function=look)])
    (found,) = epoch(pipe)
    assert [one.tobytes() for one in found] == contents
    assert len(seen) == 24 and sorted(seen) == sorted(ours)


def test_dali_reads_samples_of_one_size_where_the_engine_put_them(tmp_path):
    records, ours, seen = write_records(tmp_path / "records", 24, 64), [], []

    def note(batch):
        ours.extend(row.data_ptr() for row in batch)
        return batch

    data = GDSDataset(tmp_path / "records", 8, Records("u1", (64,)), shuffle=False, device="cpu", transform=note)
    source = dali.source(data)

    def look(record):
        seen.append(record.ctypes.data)
        return record.copy()

    pipe = pipeline(lambda fn: [fn.python_function(fn.external_source(source, no_copy=True), function=look)])
    (found,) = epoch(pipe)
    assert np.array_equal(np.stack(found), records) and sorted(seen) == sorted(ours)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_memory_lives_as_long_as_dali_looks_at_it_and_no_longer(tmp_path, depth):
    freed, wrong = set(), []

    def traced(batch):
        """Copy the bytes to memory whose end is recorded."""
        number = int(batch["number"][0])
        memory = np.concatenate([one.numpy() for one in batch["jpg"]])
        weakref.finalize(memory, freed.add, number)
        sizes = [len(one) for one in batch["jpg"]]
        return {"jpg": list(torch.from_numpy(memory).split(sizes)), "number": batch["number"]}

    contents = [bytes([i]) * (100 + i) for i in range(80)]
    source = dali.source(photos_on("cpu", tmp_path, contents, "encoded", transform=traced), ["jpg", "number"])

    def look(content, number):
        if int(number) // 8 * 8 in freed or content.tobytes() != contents[int(number)]:
            wrong.append(int(number))
        return content.copy()

    def outputs(fn):
        both = fn.external_source(source, num_outputs=2, batch=True, no_copy=True)
        return [fn.python_function(*both, function=look)]

    pipe = pipeline(outputs, prefetch_queue_depth=depth)
    (found,) = epoch(pipe)
    assert not wrong and [one.tobytes() for one in found] == contents
    del pipe
    gc.collect()
    assert freed == set(range(0, 80, 8))


def test_an_epoch_ends_and_the_next_call_begins_another(tmp_path):
    source = dali.source(photos_on("cpu", tmp_path, [b"x"] * 20, "encoded"), ("jpg", "number"))
    for _ in range(2):
        sizes = [len(source()[0]) for _ in range(3)]
        assert sizes == [8, 8, 4]
        with pytest.raises(StopIteration):
            source()


def test_a_field_that_dali_cannot_take_is_an_error_with_the_remedy(tmp_path):
    texts = dali.source(photos_on("cpu", tmp_path, [b"x"] * 4, "txt"), "jpg")
    with pytest.raises(ValueError, match=r"field 'jpg' \(list\).*decode=\{'jpg': 'encoded'\}"):
        texts()
    nested = dali.source(photos_on("cpu", tmp_path, [b"x"] * 4, ragged="nested"), "jpg")
    with pytest.raises(ValueError, match="field 'jpg'"):
        nested()
    with pytest.raises(KeyError, match="png"):
        dali.source(photos_on("cpu", tmp_path, [b"x"] * 4), "png")()


@pytest.mark.gpu
def test_dali_decodes_on_the_gpu_out_of_pinned_memory(tmp_path):
    contents = [encoded(photo(60, 80, seed=i)) for i in range(40)]
    expected = [one for batch in photos_on("cpu", tmp_path, contents, "image") for one in batch["jpg"]]
    source = dali.source(photos_on("cuda", tmp_path, contents, "encoded"), "jpg")

    def outputs(fn):
        return [decoder_of_dali(fn, fn.external_source(source, batch=True, no_copy=True), "mixed")]

    (found,) = epoch(pipeline(outputs, device_id=0))
    for image, one in zip(found, expected, strict=True):
        assert np.abs(image.astype(float) - one.permute(1, 2, 0).numpy()).mean() < 4


@pytest.mark.gpu
def test_dali_takes_batches_on_the_gpu(tmp_path):
    records = write_records(tmp_path / "records", 400, 4096)
    source = dali.source(GDSDataset(tmp_path / "records", 8, Records("u1", (4096,)), shuffle=False, device="cuda"))
    pipe = pipeline(
        lambda fn: [fn.external_source(source, device="gpu", batch=True, no_copy=True) + np.uint8(1)], device_id=0
    )
    (found,) = epoch(pipe)
    assert np.array_equal(np.stack(found), records + np.uint8(1))


@pytest.mark.gpu
def test_bytes_on_the_gpu_are_refused_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"a Ragged on cuda:0.*'encoded'"):
        dali.source(photos_on("cuda", tmp_path, [b"x"] * 4), "jpg")()
