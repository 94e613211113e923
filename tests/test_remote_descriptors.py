"""Objects of real servers while a process has no descriptor left."""

import warnings
from pathlib import Path

import pytest
import torch
from helpers import in_new_process
from test_open_files import limit_descriptors

import gdsdata
from gdsdata import EngineOptions, GDSDataset, Reading, _engine
from gdsdata.formats import Records
from gdsdata.storage.settings import RemoteSettings

OBJECTS, OPEN, MANY, SIZE = 22, 20, 400, 4096


def content(i: int) -> bytes:
    return bytes([i]) * SIZE


@pytest.fixture(scope="module")
def source(seaweedfs) -> str:
    for i in range(OBJECTS):
        seaweedfs.put(f"descriptors/{i:03}.bin", content(i))
    return seaweedfs.url("descriptors/")


@pytest.fixture
def options(seaweedfs) -> dict:
    keys = {"access_key_id": seaweedfs.access_key, "secret_access_key": seaweedfs.secret_key}
    return {"endpoint_url": seaweedfs.endpoint_url, "region": seaweedfs.region, "credentials": keys}


def read_beside_idle_files(source: str, options: dict, cache: Path) -> None:
    RemoteSettings.of([source], cache, "1GiB", options).take_effect()
    tensor = torch.empty(SIZE, dtype=torch.uint8)
    with gdsdata.Engine(EngineOptions(workers=2, direct="never")) as engine:
        for i in range(OBJECTS):
            if i >= OPEN:
                _engine.configure_http()  # the next request needs a new connection
                limit_descriptors(512, 0)  # the program takes what the last read has closed
            engine.read(f"{source}{i:03}.bin", tensor).result()
            assert bytes(tensor.numpy()) == content(i)


def test_a_new_connection_takes_descriptors_that_idle_files_hold(source, options, tmp_path):
    in_new_process(read_beside_idle_files, source, options, tmp_path / "cache")


def read_all(source: str, options: dict, cache: Path) -> tuple[list[int], list[str]]:
    reading = Reading(storage_options=options, cache=cache, cache_bytes="1GiB", options=EngineOptions(workers=4))
    dataset = GDSDataset(source, 64, Records("u1", (SIZE,)), shuffle=True, device="cpu", reading=reading)
    torch.empty(0)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        limit_descriptors(110)
        for _ in range(2):
            got = [batch.numpy()[:, 0].tolist() for batch in dataset]
    return sorted(sum(got, [])), [str(warning.message) for warning in warned]


def test_a_cache_takes_all_of_more_objects_than_descriptors(seaweedfs, options, tmp_path):
    for i in range(MANY):
        seaweedfs.put(f"many/{i:03}.bin", content(i % 256))
    got, warned = in_new_process(read_all, seaweedfs.url("many/"), options, tmp_path / "cache")
    assert got == sorted(i % 256 for i in range(MANY))
    assert warned == []
