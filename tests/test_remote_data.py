"""Batches from URLs are those of the same files, in each shuffle."""


import numpy as np
import pytest
from helpers import assert_same_batches, grouped
from object_server import serving
from servers.fixtures import seaweedfs  # noqa: F401
from sources import SOURCES

from gdsdata import GDSDataset

MIB = 2**20

pytestmark = pytest.mark.filterwarnings("ignore:.*were unpacked")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as server:
        yield server


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "data"
    made.mkdir()
    return made


def read(source, format, **arguments):
    return GDSDataset(
        source,
        **grouped({"batch_size": 2, "format": format, "device": "cpu", "ragged": "padded", "seed": 7, **arguments}),
    )


def flat(batches):
    return [
        np.asarray(value) for batch in batches for value in (batch.values() if isinstance(batch, dict) else [batch])
    ]


@pytest.mark.parametrize("shuffle", [False, True, "lanes", "auto"])
@pytest.mark.parametrize("name", SOURCES)
def test_batches_of_objects_are_those_of_the_files(folder, server, name, shuffle):
    SOURCES[name].write(folder)
    server.put_folder(folder, "data/")
    here, there = (read(source, SOURCES[name].format(), shuffle=shuffle) for source in (folder, server.url("data/")))
    for _ in range(2):
        assert_same_batches(flat(there), flat(here))
