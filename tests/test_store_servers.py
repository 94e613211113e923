"""Stores on real servers: SeaweedFS, rclone, Azurite and a stand-in for Google's."""

import os
import threading
import time
import urllib.request
from urllib.parse import parse_qsl, urlsplit

import pytest
from servers.fault_kinds import KINDS, Plan
from servers.faults import FaultServer

from gdsdata.errors import IoError
from gdsdata.storage import checksums, credentials, transport
from gdsdata.storage.store import ObjectInfo
from gdsdata.storage.stores import azure, gcs, s3, web

ODD_KEYS = ["a b", "a+b", "a%20b", "ü/é", "q?&=#;", "'(*)!~$,:@", "d/e/f", "d/e.txt", "z<&>"]


def store_of(server, **options):
    if server.scheme == "s3":
        given = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
        return s3.make(server.bucket, "s3", {"endpoint_url": server.endpoint_url, "credentials": given, **options})
    if server.scheme == "az":
        options = {"account": server.access_key, "endpoint_url": server.endpoint_url, **options}
        return azure.make(server.bucket, "az", {"credentials": {"account_key": server.secret_key}, **options})
    options = {"endpoint_url": server.endpoint_url, "credentials": {"token": "any"}, **options}
    return gcs.make(server.bucket, "gs", options)


def get(access, first, last):
    """Request a range as the engine does, without gdsdata."""
    headers = {**access.headers, "Range": f"bytes={first}-{last}"}
    with urllib.request.urlopen(urllib.request.Request(access.url, headers=headers)) as answer:
        return answer.read(), answer.headers["ETag"]


def listed(store, prefix, delimiter=""):
    where = store.list(prefix, delimiter)
    return [one if isinstance(one, str) else one.url.split("/", 3)[3] for one in where]


@pytest.fixture(params=["seaweedfs", "rclone", "azurite"])
def server(request):
    return request.getfixturevalue(request.param)


def test_keys_of_any_characters_are_written_listed_read_and_deleted(server):
    store = store_of(server)
    keys = [f"odd/{key}" for key in ODD_KEYS]
    for key in keys:
        written = store.put(key, key.encode())
        assert server.get(key) == key.encode()
        assert written == ObjectInfo(f"{server.scheme}://{server.bucket}/{key}", len(key.encode()), written.tag)
        assert store.head(key).version == written.version
        content, tag = get(store.access(key), 1, 3)
        assert content == key.encode()[1:4]
        assert ObjectInfo("", 0, tag).version == written.version
    assert listed(store, "odd/") == sorted(keys) == sorted(server.names("odd/"))
    assert {one.version for one in store.list("odd/")} == {store.head(key).version for key in keys}
    assert listed(store, "odd/d/", "/") == ["odd/d/e.txt", "odd/d/e/"]
    store.delete([*keys, "odd/there is none"])
    assert server.names("odd/") == listed(store, "odd/") == []


def test_a_large_object_appears_whole_when_its_parts_are_complete(server):
    store = store_of(server)
    content = os.urandom(1000) * 35_000
    upload = store.upload("large", len(content))
    count = -(-len(content) // upload.part_bytes)
    parts = [memoryview(content)[n * upload.part_bytes : (n + 1) * upload.part_bytes] for n in range(count)]
    threads = [threading.Thread(target=upload.send, args=(n, part)) for n, part in reversed(list(enumerate(parts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert "large" not in server.names("large")
    written = upload.complete()
    assert (written.size_bytes, written.version) == (len(content), store.head("large").version)
    assert (
        get(store.access("large"), upload.part_bytes - 3, upload.part_bytes + 2)[0]
        == (content[upload.part_bytes - 3 : upload.part_bytes + 3])
    )
    assert server.get("large") == content
    store.delete(["large"])


def test_an_aborted_upload_leaves_no_object(server):
    store = store_of(server)
    upload = store.upload("aborted", 5)
    upload.send(0, memoryview(b"12345"))
    upload.abort()
    assert "aborted" not in server.names()
    if server.scheme == "s3":  # Azure's blocks go by themselves
        assert server.uploads() == []
        with pytest.raises(OSError):
            upload.complete()


def test_an_empty_object_is_written_in_parts(server):
    store = store_of(server)
    assert store.upload("empty", 0).complete().size_bytes == 0
    assert server.get("empty") == b""
    store.delete(["empty"])


def test_a_list_of_many_pages_is_complete(server, monkeypatch):
    """Pages of seven, because each of these servers has its own limit."""
    store = store_of(server)
    keys = [f"pages/{n:03d}" for n in range(40)]
    for key in keys:
        server.put(key, b"x")
    send, queries = transport._attempt, []

    def smaller_pages(method, url, headers, body, timeout_s, most_bytes):
        queries.append(dict(parse_qsl(urlsplit(url).query)))
        return send(method, url, headers, body, timeout_s, most_bytes)

    monkeypatch.setattr(transport, "_attempt", smaller_pages)
    name = "maxresults" if server.scheme == "az" else "max-keys"
    kind = type(store)
    of_request = kind._request if server.scheme == "az" else kind.request

    def request(self, method, key, query=None, *more):
        return of_request(self, method, key, {**query, name: "7"} if query and "prefix" in query else query, *more)

    monkeypatch.setattr(kind, of_request.__name__, request)
    assert listed(store, "pages/") == keys
    assert len(queries) >= 6
    store.delete(keys)
    assert listed(store, "pages/") == []


def test_a_missing_object_and_wrong_keys_are_distinguished(server):
    store = store_of(server)
    for ask in (store.head, lambda key: get(store.access(key), 0, 0)):
        with pytest.raises(OSError, match="404"):
            ask("nothing/here")
    with pytest.raises(FileNotFoundError, match=f"{server.scheme}://.*nothing/here: HEAD http://127"):
        store.head("nothing/here")
    wrong = {"account_key": "d3Jvbmc="}
    if server.scheme == "s3":
        wrong = {"access_key_id": server.access_key, "secret_access_key": "wrong-" + server.secret_key}
    asks = [lambda store: store.head("key"), lambda store: store.put("k", b"1"), lambda store: list(store.list(""))]
    for ask in asks:
        with pytest.raises(PermissionError, match="403") as caught:
            ask(store_of(server, credentials=wrong))
        assert not any(secret in str(caught.value) for secret in [list(wrong.values())[-1], "sig=", "Signature="])


def test_a_damaged_body_is_refused(server, monkeypatch):
    """The server verifies the checksum that goes with each body."""
    if server.name == "rclone":
        pytest.skip("rclone serve s3 verifies no checksum")
    store = store_of(server)
    upload = store.upload("damaged", 5)
    send = transport._attempt

    def damaging(method, url, headers, body, timeout_s, most_bytes):
        sent = b"!" + bytes(body)[1:] if method == "PUT" else body
        return send(method, url, headers, sent, timeout_s, most_bytes)

    monkeypatch.setattr(transport, "_attempt", damaging)
    for write in (lambda: store.put("damaged", b"12345"), lambda: upload.send(0, memoryview(b"12345"))):
        with pytest.raises(OSError):
            write()
    assert "damaged" not in server.names()
    upload.abort()  # the server is shared with other tests


def test_a_session_of_many_threads_uses_one_store(server):
    store = store_of(server)
    wrong = []

    def write(n):
        try:
            for m in range(5):
                store.put(f"many/{n}/{m}", bytes([n, m]))
                assert store.head(f"many/{n}/{m}").size_bytes == 2
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == [] and len(listed(store, "many/")) == 40
    store.delete(listed(store, "many/"))


def test_an_azure_sas_is_enough(azurite):
    store = azure.make(
        azurite.bucket,
        "az",
        {"account": azurite.access_key, "endpoint_url": azurite.endpoint_url, "credentials": {"sas": azurite.sas}},
    )
    store.put("sas", b"content")
    assert get(store.access("sas"), 0, 2)[0] == b"con"
    assert listed(store, "sas") == ["sas"]
    store.delete(["sas"])


def test_an_access_to_azure_allows_reading_alone(azurite):
    access = store_of(azurite).access("only/read")
    request = transport.Request("PUT", access.url, {**access.headers, "x-ms-blob-type": "BlockBlob"}, b"x")
    with pytest.raises(PermissionError, match="403"):
        transport.send(request)


def test_an_access_that_has_expired_is_refused(seaweedfs):
    seaweedfs.put("expiring", b"content")
    soon = {
        "access_key_id": seaweedfs.access_key,
        "secret_access_key": seaweedfs.secret_key,
        "expires_at": time.time() + 1.5,
    }
    access = store_of(seaweedfs, credentials=soon).access("expiring")
    assert access.lifetime_s <= 1.5
    assert get(access, 0, 2)[0] == b"con"
    time.sleep(2.1)  # the server's own clock
    with pytest.raises(OSError, match="403"):
        get(access, 0, 2)


def test_a_server_takes_requests_that_the_requester_pays_for(seaweedfs):
    store = store_of(seaweedfs, requester_pays=True)
    store.put("payed/a b", b"content")
    assert listed(store, "payed/") == ["payed/a b"] and store.head("payed/a b").size_bytes == 7
    assert get(store.access("payed/a b"), 0, 6)[0] == b"content"


def test_googles_stand_in_is_listed_and_read(gcs):
    store = store_of(gcs)
    for key in ("g/a b", "g/ü", "g/d/c"):
        gcs.put(key, key.encode())
    assert listed(store, "g/") == sorted(["g/a b", "g/d/c", "g/ü"])
    assert listed(store, "g/", "/") == ["g/a b", "g/d/", "g/ü"]
    info = store.head("g/a b")
    content, tag = get(store.access("g/a b"), 0, 2)
    assert (content, info.size_bytes) == (b"g/a", 5)
    assert ObjectInfo("", 0, tag).version == info.version
    store.delete(["g/a b", "g/none"])
    assert listed(store, "g/") == ["g/d/c", "g/ü"]
    with pytest.raises(FileNotFoundError, match="gs://"):
        store.head("g/a b")


def test_googles_parts_go_the_way_of_s3(seaweedfs, monkeypatch):
    """The XML interface of Google is that of S3: SeaweedFS takes its requests if S3 signs them."""
    store = gcs.make(seaweedfs.bucket, "gs", {"endpoint_url": seaweedfs.endpoint_url, "credentials": "anonymous"})
    signer = store_of(seaweedfs)

    def sign(request):
        sha256 = checksums.sha256_hex(request.body)
        return signer.sign(
            transport.Request(request.method, request.url, {"x-amz-content-sha256": sha256}, request.body)
        )

    monkeypatch.setattr(store, "sign", sign)
    content = os.urandom(1000) * 20_000
    upload = store.upload("google", len(content))
    for number in range(2):
        upload.send(number, memoryview(content)[number * upload.part_bytes : (number + 1) * upload.part_bytes])
    assert upload.complete().size_bytes == len(content)
    assert seaweedfs.get("google") == content
    store.delete(["google"])


def test_a_presigned_url_is_read_as_a_web_address(seaweedfs):
    """It is signed for GET: HEAD is refused."""
    seaweedfs.put("web", b"0123456789")
    url = urlsplit(store_of(seaweedfs).access("web").url)
    store = web.make(url.netloc, "http", {})
    key = f"{url.path[1:]}?{url.query}"
    assert store.head(key).size_bytes == 10
    assert get(store.access(key), 2, 3)[0] == b"23"
    with pytest.raises(PermissionError) as caught:
        store.head(key[:-4] + "0000")
    assert "Signature" not in str(caught.value).replace("SignatureDoesNotMatch", "")


def test_a_server_that_ends_is_named(seaweedfs, monkeypatch):
    monkeypatch.setattr(transport, "_UNREACHED_S", 0.2)
    store = store_of(seaweedfs, endpoint_url="http://127.0.0.1:9")
    with pytest.raises(IoError, match=r"HEAD http://127.0.0.1:9/.* failed \(.*Check the network"):
        store.head("key")


# ------------------------------------------------------------------------------------------------------------ faults

NEVER_RETRIED = {"status_403", "status_404"}
RENEWED_ONCE = {"expired"}


@pytest.fixture
def quick_retries(monkeypatch):
    monkeypatch.setattr(transport, "_ATTEMPT_S", 0.5)
    monkeypatch.setattr(transport, "_SLOWEST_BYTES_PER_S", 1e9)
    monkeypatch.setattr(transport, "_FIRST_WAIT_S", 0.001)


@pytest.mark.parametrize("seed", range(3))
def test_faults_of_every_kind_leave_whole_objects(quick_retries, seed):
    kinds = sorted(set(KINDS) - NEVER_RETRIED - RENEWED_ONCE)
    with FaultServer(Plan(seed=seed, share=0.4, kinds=kinds, retry_after_s=0)) as server:
        store = s3.make(server.bucket, "s3", server_options(server))
        content = os.urandom(1000) * 18_000
        for n in range(20):
            assert store.put(f"small/{n}", bytes([n])).size_bytes == 1
            assert store.head(f"small/{n}").version == store.head(f"small/{n}").version
        upload = store.upload("large", len(content))
        for number in range(2):
            upload.send(number, memoryview(content)[number * upload.part_bytes : (number + 1) * upload.part_bytes])
        assert upload.complete().size_bytes == len(content)
        assert listed(store, "small/") == sorted(f"small/{n}" for n in range(20))
        faults = server.counts()["faults"]
        server.plan = Plan()
        assert server.get("large") == content
        assert [server.get(f"small/{n}") for n in range(20)] == [bytes([n]) for n in range(20)]
        assert server.uploads() == []
        store.delete(server.names())
        assert server.names() == []
    assert sum(faults.values()) > 20, faults


@pytest.mark.parametrize(("kind", "error"), [("status_403", PermissionError), ("status_404", FileNotFoundError)])
def test_a_refusal_by_a_server_is_final(quick_retries, kind, error):
    with FaultServer() as server:
        store = s3.make(server.bucket, "s3", server_options(server))
        server.fail_next(kind)
        with pytest.raises(error, match="s3://bucket/key: PUT"):
            store.put("key", b"1")
        assert server.counts()["requests"] == 1


@pytest.mark.parametrize("ask", ["put", "head", "list"])
def test_a_token_that_expires_is_renewed(quick_retries, monkeypatch, ask):
    monkeypatch.setattr(credentials, "_NEW_S", 0.0)
    with FaultServer() as server:
        server.put("key", b"1")
        store = s3.make(server.bucket, "s3", {**server_options(server), "credentials": rotating(server)})
        store.head("key")
        server.fail_next("expired")
        {"put": lambda: store.put("key", b"2"), "head": lambda: store.head("key"), "list": lambda: listed(store, "")}[
            ask
        ]()
        assert server.counts()["faults"] == {"expired": 1}
        assert store.secrets.current().session_token == "1"


def server_options(server):
    given = {"access_key_id": server.access_key, "secret_access_key": server.secret_key}
    return {"endpoint_url": server.endpoint_url, "credentials": given, "region": server.region}


def rotating(server):
    """Give keys that have another session token each time."""
    count = iter(range(10**6))
    return lambda: {
        "access_key_id": server.access_key,
        "secret_access_key": server.secret_key,
        "session_token": str(next(count)),
    }
