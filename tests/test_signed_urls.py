"""Signed URLs: newly signed they name the same objects, for the cache and for kept indexes."""

import datetime
import itertools
import os
import urllib.request

import numpy as np
import pytest
from object_server import serving
from servers import azurite as azure

from gdsdata import GDSDataset, Reading
from gdsdata.formats import Records
from gdsdata.io import remote_access
from gdsdata.storage import objects, settings

SIZE, SAMPLES = 64, 50
VALUES = np.arange(SIZE * SAMPLES, dtype=np.uint8).reshape(SAMPLES, SIZE)
ROTATIONS = itertools.count(600)
CONTENT = {"a": VALUES.tobytes(), "b": VALUES[::-1].tobytes()}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(settings, "_folder_of_derived", None)
    yield
    remote_access.use_cache(None, None)
    objects.forget("http://")


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as server:
        server.content |= {f"{name}.bin": content for name, content in CONTENT.items()}
        yield server


def signed_by(server, style: str, more: str = "") -> list[str]:
    """Return the URLs of the objects, with another signature each time."""
    number = next(ROTATIONS)
    query = {
        "s3": f"X-Amz-Credential=k&X-Amz-Date={number}&X-Amz-Expires=9&X-Amz-Signature={number}",
        "gcs": f"X-Goog-Credential=k&X-Goog-Date={number}&X-Goog-Signature={number}",
        "azure": f"sv=2021-08-06&se={number}&sr=b&sp=r&sig={number}",
        "cloudfront": f"Expires={number}&Signature={number}&Key-Pair-Id=k",
        "hub": f"response-content-disposition=inline&Policy={number}&Signature={number}&Key-Pair-Id=k",
    }[style]
    return [f"{server.address}/bucket/{name}.bin?{query}{more}" for name in CONTENT]


def read(urls, cache):
    objects.forget("http://")  # as a new process: it asks the server for the version
    reading = Reading(cache=cache, cache_bytes="1GiB")
    dataset = GDSDataset(urls, 10, Records("u1", (SIZE,)), shuffle=False, device="cpu", reading=reading)
    values = np.concatenate([batch.numpy().copy() for batch in dataset])
    return values, dataset


def all_values(content=CONTENT):
    return np.concatenate([np.frombuffer(one, np.uint8).reshape(-1, SIZE) for one in content.values()])


def bytes_fetched(server):
    return sum(end - begin for method, _, begin, end in server.requests if method == "GET")


def stored_text(folder):
    return b"".join(
        open(os.path.join(place, name), "rb").read() for place, _, names in os.walk(folder) for name in names
    )


@pytest.mark.parametrize("style", ["s3", "gcs", "azure", "cloudfront", "hub"])
def test_newly_signed_urls_find_their_objects_in_the_cache(server, tmp_path, style):
    first, _ = read(signed_by(server, style), tmp_path / "nvme")
    assert bytes_fetched(server) >= len(first.tobytes())
    server.requests = []
    again, dataset = read(signed_by(server, style), tmp_path / "nvme")
    assert np.array_equal(again, all_values()) and np.array_equal(first, again)
    assert bytes_fetched(server) == 0
    assert server.requests, "the server says which version is the right one"
    assert dataset.stats()["bytes"]["local_cache"] == len(again.tobytes())


def test_a_replaced_object_is_seen_under_a_new_signature(server, tmp_path):
    read(signed_by(server, "s3"), tmp_path / "nvme")
    server.content["a.bin"] = replaced = VALUES[:, ::-1].tobytes()  # of the same size
    got, _ = read(signed_by(server, "s3"), tmp_path / "nvme")
    assert np.array_equal(got, all_values(CONTENT | {"a": replaced}))


@pytest.mark.parametrize("more", ["&versionId=7", "&id=2"])
def test_a_parameter_that_is_no_signature_names_another_object(server, tmp_path, more):
    read(signed_by(server, "s3"), tmp_path / "nvme")
    server.requests = []
    got, _ = read(signed_by(server, "s3", more), tmp_path / "nvme")
    assert np.array_equal(got, all_values())
    assert bytes_fetched(server) == len(got.tobytes())


@pytest.fixture
def indexes_made(monkeypatch):
    made = []
    index = Records.index
    monkeypatch.setattr(Records, "index", lambda self, paths: made.append(list(paths)) or index(self, paths))
    return made


def test_newly_signed_urls_find_their_kept_index_and_are_read_by_the_new_signature(
    server, tmp_path, indexes_made, monkeypatch
):
    asked = []
    answer = server.answer
    monkeypatch.setattr(server, "answer", lambda request: asked.append(request.path) or answer(request))
    for _ in range(3):
        objects.forget("http://")
        urls = signed_by(server, "s3")
        asked.clear()
        reading = Reading(index_cache=tmp_path / "kept")
        dataset = GDSDataset(urls, 10, Records("u1", (SIZE,)), shuffle=False, device="cpu", reading=reading)
        assert np.array_equal(np.concatenate([batch.numpy().copy() for batch in dataset]), all_values())
        assert set(asked) == {url.removeprefix(server.address) for url in urls}
    assert len(indexes_made) == 1


def test_a_kept_index_of_a_replaced_object_is_made_anew(server, tmp_path, indexes_made):
    read(signed_by(server, "s3"), tmp_path / "nvme")
    server.content["b.bin"] += bytes(SIZE)
    got, _ = read(signed_by(server, "s3"), tmp_path / "nvme")
    assert len(got) == 2 * SAMPLES + 1
    assert len(indexes_made) == 2


def test_one_object_with_two_signatures_is_read_twice_and_its_index_is_not_kept(server, tmp_path, indexes_made):
    for _ in range(2):
        urls = [signed_by(server, "s3")[0], signed_by(server, "s3")[0]]
        got, _ = read(urls, tmp_path / "nvme")
        assert np.array_equal(got, np.concatenate([VALUES, VALUES]))
    assert len(indexes_made) == 2


def test_no_file_of_the_cache_has_a_signature(server, tmp_path):
    urls = signed_by(server, "s3")
    read(urls, tmp_path / "nvme")
    assert any(name.endswith(".gdsdata-index") for _, _, names in os.walk(tmp_path) for name in names)
    found = stored_text(tmp_path)
    assert b"/bucket/a.bin" in found and b"X-Amz-Signature" not in found


def test_real_signatures_of_s3_find_their_objects(seaweedfs, tmp_path):
    for name, content in CONTENT.items():
        seaweedfs.put(f"resigned/{name}.bin", content)

    def urls():
        named = [{"Bucket": seaweedfs.bucket, "Key": f"resigned/{name}.bin"} for name in CONTENT]
        return [seaweedfs.client.generate_presigned_url("get_object", one, next(ROTATIONS)) for one in named]

    assert not set(urls()) & set(urls())
    for is_cached in (False, True):
        got, dataset = read(urls(), tmp_path / "nvme")
        assert np.array_equal(got, all_values())
        assert (dataset.stats()["bytes"]["cache_fill"] > 0) is not is_cached


def test_real_signatures_of_azure_find_their_objects(azurite, tmp_path):
    for name, content in CONTENT.items():
        azurite.put(f"resigned/{name}.bin", content)

    def urls():
        sas = azure.signed(datetime.timedelta(seconds=next(ROTATIONS)))
        return [f"{azurite.container.url}/resigned/{name}.bin?{sas}" for name in CONTENT]

    with urllib.request.urlopen(urls()[0]) as answer:
        assert answer.read() == CONTENT["a"]
    for is_cached in (False, True):
        got, dataset = read(urls(), tmp_path / "nvme")
        assert np.array_equal(got, all_values())
        assert (dataset.stats()["bytes"]["cache_fill"] > 0) is not is_cached
