"""Access to objects in the middle of an epoch: a secret that a server refuses is renewed."""

import numpy as np
import pytest
from helpers import exit_code_of_fork
from servers.faults import FaultServer

from gdsdata import GDSDataset
from gdsdata.errors import IoError
from gdsdata.formats import Records
from gdsdata.io import remote_access
from gdsdata.storage import credentials, objects, ranges, stores

FILES, RECORDS, RECORD_BYTES = 6, 40, 64


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(credentials, "_NEW_S", 0.0)
    with FaultServer() as running:
        for number in range(FILES):
            running.put(f"{number}.bin", bytes([number]) * (RECORDS * RECORD_BYTES))
        yield running
    objects.forget("s3://")
    stores.configure("s3")


class Keys:
    """A function for `credentials=` that gives another key at each call, and no end of it."""

    def __init__(self, most=100):
        self.calls, self.most = 0, most

    def __call__(self):
        if self.calls == self.most:
            raise OSError("no new key today")
        self.calls += 1
        return {"access_key_id": f"KEY{self.calls}", "secret_access_key": "a-secret"}


def records_of(server, keys):
    options = {"endpoint_url": server.endpoint_url, "region": server.region, "credentials": keys}
    return GDSDataset(
        server.url(""), 8, Records("u1", (RECORD_BYTES,)), shuffle=True, device="cpu", storage_options=options
    )


def counted(epoch):
    """Return how often each number is the first byte of a record."""
    return np.bincount(np.concatenate([np.asarray(batch)[:, 0] for batch in epoch]), minlength=FILES).tolist()


EACH_ONCE = [RECORDS] * FILES


def test_an_epoch_goes_on_with_a_new_key_if_the_old_one_ends(server):
    keys = Keys()
    data = records_of(server, keys)
    assert counted(data) == EACH_ONCE and keys.calls == 1
    for ended in ("KEY1", "KEY2"):
        server.ended_keys.add(ended)
        assert counted(data) == EACH_ONCE
        assert keys.calls == len(server.ended_keys) + 1  # once for all objects


def test_a_forked_child_reads_from_the_cache_of_its_parent(server, tmp_path):
    stores.configure("s3", endpoint_url=server.endpoint_url, region=server.region, credentials=Keys())
    url = server.url("3.bin")

    def read():
        part = ranges.Range(url, objects.identity_of(url), 10, RECORD_BYTES)
        assert ranges.read_many([part]) == [bytes([3]) * RECORD_BYTES]

    remote_access.use_cache(str(tmp_path / "cache"), None)
    try:
        read()
        asked = server.counts()["statuses"]
        assert exit_code_of_fork(read) == 0
        assert server.counts()["statuses"] == asked
    finally:
        remote_access.use_cache(None, None)


def test_a_refused_object_does_not_lose_a_secret_that_cannot_be_renewed(server):
    data = records_of(server, Keys(most=1))
    assert counted(data) == EACH_ONCE
    server.fail_next("status_403", count=50, key="3.bin")
    with pytest.raises(IoError, match=r"3\.bin.*403"):
        counted(data)
    server.plan.scripted.clear()
    assert counted(data) == EACH_ONCE


def test_objects_that_are_opened_again_keep_their_secret(server):
    keys = Keys()
    for _ in range(2):
        assert counted(records_of(server, keys)) == EACH_ONCE
    assert keys.calls == 1
