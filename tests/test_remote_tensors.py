"""Single tensors of objects: `Engine.read` and `read_tensor` with URLs."""

import numpy as np
import pytest
import torch
from object_server import serving

import gdsdata
from gdsdata.errors import CorruptData


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as running:
        yield running


def test_a_tensor_is_read_from_an_object_at_any_offset(server):
    values = np.arange(300_000, dtype=np.float32)
    server.content["w.bin"] = b"abc" + values.tobytes()
    read = gdsdata.read_tensor(server.url("w.bin"), torch.float32, (300, 1000), offset=3)
    assert torch.equal(read, torch.from_numpy(values).reshape(300, 1000))


def test_read_tensor_reads_the_newest_version(server):
    for byte in (b"1", b"2"):
        server.content["k"] = byte * 1000
        assert gdsdata.read_tensor(server.url("k"), torch.uint8, (1000,))[500] == byte[0]


def test_an_engine_reads_many_ranges_after_one_request_for_the_size(server):
    server.content["k"] = bytes(range(256)) * 64
    with gdsdata.Engine() as engine:
        futures = [engine.read(server.url("k"), torch.empty(100, dtype=torch.uint8), offset=i) for i in range(50)]
        for i, future in enumerate(futures):
            assert bytes(future.result()) == server.content["k"][i : i + 100]
    assert server.heads == 1


def test_an_object_that_is_replaced_meanwhile_is_corrupt_data(server):
    server.content["k"] = b"1" * 1000
    with gdsdata.Engine() as engine:
        engine.read(server.url("k"), torch.empty(10, dtype=torch.uint8)).result()
        server.content["k"] = b"2" * 1000
        with pytest.raises(CorruptData, match="s3://bucket/k.*replaced"):
            engine.read(server.url("k"), torch.empty(10, dtype=torch.uint8)).result()


def test_a_missing_object_and_one_that_is_too_short_are_errors_of_the_future(server):
    server.content["k"] = b"1" * 1000
    with gdsdata.Engine() as engine:
        missing = engine.read(server.url("none"), torch.empty(10, dtype=torch.uint8))
        short = engine.read(server.url("k"), torch.empty(10, dtype=torch.uint8), offset=995)
        with pytest.raises(FileNotFoundError):
            missing.result()
        with pytest.raises(CorruptData, match="ends at 1000 bytes"):
            short.result()


def test_a_tensor_is_not_written_to_a_url_and_the_remedy_is_named(server):
    with pytest.raises(ValueError, match="use gdsdata.save"):
        gdsdata.write_tensor(torch.zeros(3), server.url("k"))
    assert not server.content
