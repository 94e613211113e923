"""case=remote of the bench: checkpoints in a store, and rows that must not pass."""

import dataclasses

import pytest
import torch
from test_bench import MIB
from test_bench_remote import access_of

from gdsdata.bench.cases.remote.checkpoints import StoredCheckpointRow
from gdsdata.bench.cases.remote.settings import RemoteSettings
from gdsdata.bench.cases.remote.sources import SUFFIXES, Checkpoints, SavedCheckpoints, put_checkpoint
from gdsdata.bench.data import objects
from gdsdata.bench.data.checkpoints import State
from gdsdata.bench.data.made import DataError
from gdsdata.bench.peers import registry
from gdsdata.bench.peers.gdsdata.remote import StoredSafetensors

pytestmark = pytest.mark.usefixtures("quick_programs")

INSTALLED = {
    work: [peer for peer in registry.rows("remote", work) if not registry.missing(peer)] for work in ("load", "save")
}
STATE = State(MIB, 10, ["bfloat16", "float32"], 0)


@pytest.fixture
def access(seaweedfs, monkeypatch):
    """SeaweedFS, in the environment until the test ends. DCP's writers copy objects."""
    for name, value in seaweedfs.environment().items():
        monkeypatch.setenv(name, value)
    return access_of(seaweedfs)


def checkpoint_row(key, kind, access, tmp_path, urls=None):
    source_class = {"load": Checkpoints, "save": SavedCheckpoints}[kind]
    source = source_class(kind, objects.Objects(access, [], [], [], ""), 0, STATE, tmp_path, urls)
    return StoredCheckpointRow(key, source, RemoteSettings(), {}, "cpu")


def put(form, access, tmp_path):
    """Return the URL of a checkpoint that its own library wrote, and botocore put."""
    return put_checkpoint(access, dataclasses.replace(STATE).make("cpu"), form, str(tmp_path))[0]


@pytest.mark.parametrize("peer", INSTALLED["load"], ids=lambda peer: peer.key)
def test_every_row_loads_a_checkpoint_that_is_compared(access, tmp_path, peer):
    row = checkpoint_row(peer.key, "load", access, tmp_path, {peer.loads: put(peer.loads, access, tmp_path)})
    assert row.verify("bfloat16+float32")["checked_bytes"] == STATE.bytes
    row.prepare(1)
    assert row.run("bfloat16+float32", "cold")["bytes"] == STATE.bytes
    row.compare()


@pytest.mark.parametrize("peer", INSTALLED["save"], ids=lambda peer: peer.key)
def test_every_row_saves_what_botocore_reads_back(access, tmp_path, peer):
    row = checkpoint_row(peer.key, "save", access, tmp_path)
    assert row.path == f"s3://{access.bucket}/saved/{peer.key}{SUFFIXES[peer.saves]}"
    assert row.verify("bfloat16+float32")["checked_bytes"] == STATE.bytes
    with pytest.raises(DataError, match="no objects there"):
        objects.listed(access, "saved/")


class OtherBits(StoredSafetensors):
    """Changes a bit on the way."""

    def save(self, state, path):
        name = next(iter(state))
        super().save(state | {name: state[name].clone().view(torch.int64).bitwise_xor(1).view(state[name].dtype)}, path)

    def load(self, into, path):
        found = super().load(into, path)
        next(iter(found.values())).view(torch.int64)[0] ^= 1
        return found


@pytest.mark.parametrize("kind", ["load", "save"])
def test_other_bits_in_a_checkpoint_are_an_error(access, tmp_path, kind):
    urls = {"safetensors": put("safetensors", access, tmp_path)}
    with pytest.raises(ValueError, match="not all of its bytes are those that were saved"):
        checkpoint_row(f"{__name__}:OtherBits", kind, access, tmp_path, urls).verify("bfloat16+float32")
