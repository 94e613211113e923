"""Stores without a server: the requests they send, and what they make of any answer."""

import errno
import hashlib
import re
import time
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest
from store_answers import KEYS, no_request, s3_store, serving

from gdsdata.checkpoint.urls import plain_path
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.listing import sources_of
from gdsdata.io import remote_access
from gdsdata.storage import transport
from gdsdata.storage.location import Location, local_folder, local_path, location_of
from gdsdata.storage.store import ObjectInfo
from gdsdata.storage.stores import azure, configure, gcs, s3, store_of, web
from gdsdata.storage.stores.xml_store import _tag_of_parts, part_bytes_of


@pytest.fixture
def serve(monkeypatch):
    return serving(monkeypatch)


# ------------------------------------------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("bucket", "options", "url"),
    [
        ("bucket", {}, "https://bucket.s3.eu-west-1.amazonaws.com/a%20b/c%2B"),
        ("with.dots", {}, "https://s3.eu-west-1.amazonaws.com/with.dots/a%20b/c%2B"),
        ("bucket", {"region": "cn-north-1"}, "https://bucket.s3.cn-north-1.amazonaws.com.cn/a%20b/c%2B"),
        ("bucket", {"addressing": "path"}, "https://s3.eu-west-1.amazonaws.com/bucket/a%20b/c%2B"),
        ("bucket", {"endpoint_url": "http://h:9/"}, "http://h:9/bucket/a%20b/c%2B"),
        ("bucket", {"endpoint_url": "https://h/p", "addressing": "virtual"}, "https://bucket.h/p/a%20b/c%2B"),
    ],
)
def test_the_address_of_a_bucket(serve, bucket, options, url):
    serve(no_request)
    access = s3_store(bucket, credentials="anonymous", **options).access("a b/c+")
    assert (access.url, access.headers) == (url, {})


def test_an_access_is_signed_for_as_long_as_the_keys_live(serve):
    serve(no_request)
    url = s3_store().access("key").url
    assert dict(parse_qsl(urlsplit(url).query))["X-Amz-Expires"] == str(12 * 3600)
    short = s3_store(credentials={**KEYS, "session_token": "t", "expires_at": time.time() + 1000}).access("key")
    assert 990 <= short.lifetime_s <= 1000
    assert 990 <= int(dict(parse_qsl(urlsplit(short.url).query))["X-Amz-Expires"]) <= 1000
    token = gcs.make("bucket", "gs", {"credentials": {"token": "t", "expires_at": time.time() + 500}}).access("key")
    assert token.headers == {"authorization": "Bearer t"} and token.lifetime_s <= 500


@pytest.mark.parametrize(
    ("module", "scheme", "bucket", "options", "match"),
    [
        (s3, "s3", "bucket", {"endpont_url": "x"}, "no option 'endpont_url': it has endpoint_url, region"),
        (s3, "s3", "bucket", {"region": 5}, "region of s3 is a int, but should be a str"),
        (s3, "s3", "bucket", {"endpoint_url": "h:9"}, "an endpoint is written as"),
        (s3, "s3", "bucket", {"endpoint_url": "http://[::1"}, "endpoint_url='http://[::1': an endpoint is written as"),
        (s3, "s3", "bucket", {"endpoint_url": "http://u:p@h"}, "endpoint_url='h'"),
        (s3, "s3", "bucket", {"endpoint_url": "http://h:99999"}, "the port"),
        (s3, "s3", "bucket", {"addressing": "dns"}, "choose 'auto', 'path' or 'virtual'"),
        (s3, "s3", "user@evil", {}, "a bucket's name"),
        (s3, "s3", "b", {}, "a bucket's name is 2 to 255"),
        (s3, "s3", "b--usw2-az1--x-s3", {}, "is a directory bucket (S3 Express One Zone), and gdsdata does not sign"),
        (s3, "s3", "b--usw2-az1--xa-s3", {}, "is a directory bucket"),
        (s3, "s3", "arn:aws:s3:us-west-2:1:accesspoint", {}, "name an access point by its alias, which is"),
        (s3, "s3", "b", {"requester_pays": "yes"}, "requester_pays of s3 is a str, but should be a bool"),
        (gcs, "gs", "UPPER", {}, "a bucket's name"),
        (azure, "az", "container", {}, "AZURE_STORAGE_ACCOUNT"),
        (azure, "az", "container@evil/", {}, "small letters"),
        (web, "https", "user:word@host", {}, "pass headers="),
        (web, "https", "[::1", {}, "https://[::1: the host cannot be one: Invalid IPv6 URL. Check the URL"),
    ],
)
def test_wrong_options_are_refused(serve, monkeypatch, module, scheme, bucket, options, match):
    for name in ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=re.escape(match)):
        module.make(bucket, scheme, options)


def test_configure_replaces_the_stores_of_a_scheme(serve):
    serve(no_request)
    configure("s3", endpoint_url="http://one", credentials="anonymous")
    first, location = store_of("s3://bucket/key")
    assert (first is store_of("s3://bucket/other")[0], location) == (True, Location("s3", "bucket", "key"))
    configure("s3", endpoint_url="http://two", credentials="anonymous")
    assert store_of("s3://bucket/key")[0].access("key").url == "http://two/bucket/key"
    configure("s3")


def test_an_azure_connection_string_names_the_endpoint_of_its_own_account_alone(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)

    def address(parts, **options):
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"AccountName=mine;AccountKey=a2V5;{parts}")
        return azure.make("data", "az", options).address("key")

    assert address("BlobEndpoint=http://h:1/mine") == "http://h:1/mine/data/key"
    other = address("BlobEndpoint=http://h:1/mine", account="other")
    assert other == "https://other.blob.core.windows.net/data/key"
    china = "EndpointSuffix=core.chinacloudapi.cn"
    assert address(china) == "https://mine.blob.core.chinacloudapi.cn/data/key"
    assert address(f"DefaultEndpointsProtocol=http;{china}") == "http://mine.blob.core.chinacloudapi.cn/data/key"


def test_an_azure_connection_string_with_a_sas_names_its_account_by_the_endpoint(monkeypatch):
    for name in ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    parts = "BlobEndpoint=https://mine.blob.core.windows.net/;SharedAccessSignature=sv=2021&sig=a%3D"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", parts)
    access = azure.make("data", "az", {}).access("key")
    assert access.url == "https://mine.blob.core.windows.net/data/key?sv=2021&sig=a%3D"
    assert azure.make("data", "az", {"account": "other"}).address("k") == "https://other.blob.core.windows.net/data/k"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "BlobEndpoint=http://127.0.0.1:1/mine;AccountKey=a2V5")
    assert azure.make("data", "az", {"account": "mine"}).address("key") == "http://127.0.0.1:1/mine/data/key"


def test_an_azure_account_is_named_in_the_url():
    assert location_of("az://c@acc.blob.core.windows.net/a/b") == Location("az", "c@acc.blob.core.windows.net", "a/b")
    for bucket in ("cont@acc", "cont@acc.blob.core.windows.net", "cont@acc.dfs.core.windows.net"):
        store = azure.make(bucket, "az", {"credentials": "anonymous"})
        assert store.access("a b").url == "https://acc.blob.core.windows.net/cont/a%20b"


@pytest.mark.parametrize("url", ["gcs://b/run", "s3a://x/y", "S3://b/k", "hf://a/b?token=1", "x+y.z-1://"])
def test_a_url_of_an_unknown_scheme_is_refused_with_those_that_are_known(url):
    words = f"^'{re.escape(url.partition('?')[0])}' has no scheme .* a URL of s3://, gs://, az://, http.* or file://"
    for refuses in (local_path, location_of):
        with pytest.raises(ValueError, match=words) as caught:
            refuses(url)
        assert "token" not in str(caught.value)
    with pytest.raises(ValueError, match="^cache='.*' is a URL: give a local folder$"):
        local_folder("cache", url)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3a://bucket/a", "Write s3://bucket/a"),
        ("GS://bucket/a", "Write gs://bucket/a"),
        ("gcs://bucket/a?x", "Write gs://bucket/a"),
        ("abfss://c@acc.dfs.core.windows.net/a", "Write az://c@acc.dfs.core.windows.net/a"),
        ("hf://datasets/u/n/a.tar", "is https://huggingface.co/datasets/USER/NAME/resolve/main/FILE"),
        ("oci://bucket/a", "or file://"),
    ],
)
def test_a_scheme_by_which_other_programs_know_a_store_is_refused_with_its_name_here(url, advice):
    with pytest.raises(ValueError, match=f"{re.escape(advice)}$"):
        local_path(url)


@pytest.mark.parametrize("url", ["s3://bucket/run", "az://c/run", "https://h/a.tar", "file:///a"])
def test_a_url_that_pathlib_has_shortened_is_refused_and_no_local_folder_made(url):
    for takes in (local_path, plain_path, sources_of, lambda one: local_folder("cache", one), remote_access.local_path):
        with pytest.raises(ValueError, match=f"'{Path(url)}' is a URL .*: give the string '{url}'"):
            takes(str(Path(url)))


@pytest.mark.parametrize("path", ["/a/gcs://b", "./gcs://b", "./s3:/b", "1s://b", "a b://c", "gcs:/b", Path("gcs://b")])
def test_a_path_that_begins_with_no_scheme_is_a_path(path):
    assert local_path(path) == local_folder("cache", path) == str(path)


@pytest.mark.parametrize("key", ["a/../b", "..", "./a", "a/."])
def test_a_key_that_a_url_cannot_have_is_refused(key):
    for store in (s3_store(), azure.make("cont@acc", "az", {"credentials": "anonymous"})):
        with pytest.raises(ValueError, match="cannot be reached"):
            store.access(key)


# ----------------------------------------------------------------------------------------------------------- regions


def test_a_bucket_of_another_region_is_followed_there(serve):
    def answer(method, path, query, headers, body):
        host = urlsplit(server.requests[-1][1]).netloc
        if "ap-south-1" not in host:
            return 301, {"x-amz-bucket-region": "ap-south-1"}, b""
        assert "/ap-south-1/s3/" in headers["authorization"]
        return 200, {"content-length": "5", "etag": '"e"'}, b""

    server = serve(answer)
    store = s3_store()
    assert store.head("a/key").size_bytes == 5
    assert server.requests[-1][1] == "https://bucket.s3.ap-south-1.amazonaws.com/a/key"
    assert store.head("b").size_bytes == 5 and len(server.requests) == 3  # it is known now
    assert "ap-south-1" in store.access("key").url


def test_a_wrong_region_in_the_signature_is_mended(serve):
    def answer(method, path, query, headers, body):
        if "/eu-west-1/" in headers["authorization"]:
            return 400, {}, b"<Error><Code>AuthorizationHeaderMalformed</Code><Region>us-west-2</Region></Error>"
        return 200, {"content-length": "1", "etag": '"e"'}, b""

    server = serve(answer)
    assert s3_store("with.dots").put("key", b"x").size_bytes == 1
    assert server.requests[1][1] == "https://s3.us-west-2.amazonaws.com/with.dots/key"


def test_a_region_that_nothing_names_is_asked_for(serve):
    server = serve(lambda *_: (403, {"x-amz-bucket-region": "sa-east-1"}, b""))
    store = s3_store(region=None)
    assert store.access("key").url.startswith("https://bucket.s3.sa-east-1.amazonaws.com/key?")
    assert [(method, headers) for method, _, headers, _ in server.requests] == [("HEAD", {})]


def test_a_region_that_cannot_be_asked_for_can_be_named(serve, monkeypatch):
    """Networks without a way to the Internet reach S3 in their own region alone."""
    waited = []

    def answer(*_):
        waited.append(30.0)
        raise TimeoutError(errno.ETIMEDOUT, "no way")

    server = serve(answer)
    monkeypatch.setattr(transport, "_clock", lambda: sum(waited))
    with pytest.raises(IoError, match=r"HEAD .*no answer came in time.* the region: region= or AWS_REGION") as caught:
        s3_store(region=None).access("key")
    assert caught.value.errno == errno.ETIMEDOUT and caught.value.path == "s3://bucket"
    assert len(server.requests) == 1


def test_every_request_says_that_the_requester_pays(serve):
    bucket = Bucket(True)
    server = serve(bucket)
    store = s3_store(requester_pays=True)
    store.upload("key", 5).send(0, memoryview(b"12345"))
    bucket.objects["/key"] = b"12345"
    store.head("key")
    for _, _, headers, _ in server.requests:
        assert headers["x-amz-request-payer"] == "requester"
        assert "x-amz-request-payer" in headers["authorization"].partition("SignedHeaders=")[2]
    query = dict(parse_qsl(urlsplit(store.access("key").url).query))
    assert query["x-amz-request-payer"] == "requester" and query["X-Amz-Signature"]
    assert "payer" not in s3_store().access("key").url


def test_a_server_of_ones_own_sends_nobody_elsewhere(serve):
    server = serve(lambda *_: (301, {"x-amz-bucket-region": "evil"}, b""))
    with pytest.raises(IoError, match="301"):
        s3_store(endpoint_url="http://h").put("key", b"")
    assert len(server.requests) == 1


# ------------------------------------------------------------------------------------------------------------ writes


@pytest.mark.parametrize(
    ("size_bytes", "most", "part"),
    [
        (0, 10_000, 16 * 2**20),
        (16 * 2**20 * 10_000, 10_000, 16 * 2**20),
        (16 * 2**20 * 10_000 + 1, 10_000, 17 * 2**20),
        (5 * 2**40, 10_000, 525 * 2**20),
    ],
)
def test_parts_are_few_enough(size_bytes, most, part):
    assert part_bytes_of(size_bytes, most) == part
    assert part * most >= size_bytes


class Bucket:
    """A server that holds uploads, as S3 answers."""

    def __init__(self, knows_crc32c=True):
        self.knows_crc32c = knows_crc32c
        self.parts, self.objects, self.aborted = {}, {}, []
        self.complete_with = None

    def __call__(self, method, path, query, headers, body):
        if method == "POST" and "uploads" in query:
            echoed = {"x-amz-checksum-algorithm": "CRC32C"} if self.knows_crc32c else {}
            return 200, echoed, b"<R xmlns='u'><UploadId>up/1</UploadId></R>"
        if method == "PUT":
            self.parts[int(query["partNumber"])] = (dict(headers), body)
            return 200, {"etag": f'"{len(body):032x}"'}, b""
        if method == "POST":
            if self.complete_with:
                answer = self.complete_with.pop(0)
                if answer:
                    return answer
            self.objects[path] = b"".join(content for _, (_, content) in sorted(self.parts.items()))
            return b"<CompleteMultipartUploadResult/>"
        if method == "DELETE":
            self.aborted.append(query["uploadId"])
            return 204, {}, b""
        assert method == "HEAD"
        if path not in self.objects:
            return 404, {}, b""
        return 200, {"content-length": str(len(self.objects[path])), "etag": '"whole"'}, b""


@pytest.mark.parametrize("knows_crc32c", [True, False])
def test_an_upload_sends_parts_with_checksums_in_any_order(serve, knows_crc32c):
    bucket = Bucket(knows_crc32c)
    server = serve(bucket)
    upload = s3_store().upload("key", 40 * 2**20)
    content = bytes(range(256)) * (40 * 2**12)
    for number in (2, 0, 1):
        upload.send(number, memoryview(content)[number * upload.part_bytes : (number + 1) * upload.part_bytes])
    assert upload.complete() == ObjectInfo("s3://bucket/key", 40 * 2**20, '"whole"')
    assert bucket.objects["/key"] == content
    for headers, _ in bucket.parts.values():
        assert (headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD") == knows_crc32c
        assert ("x-amz-checksum-crc32c" in headers) == knows_crc32c
    listed = next(body for method, url, _, body in server.requests if method == "POST" and "uploadId" in url)
    assert listed.count(b"<Part>") == 3 and listed.count(b"<ChecksumCRC32C>") == 3 * knows_crc32c


@pytest.mark.parametrize("refusal", [(501, b"NotImplemented"), (400, b"InvalidArgument")])
def test_a_small_object_is_written_without_a_checksum_that_the_server_refuses(serve, refusal):
    status, code = refusal

    def answer(method, path, query, headers, body):
        if "x-amz-checksum-crc32c" in headers:
            return status, {}, b"<Error><Code>" + code + b"</Code></Error>"
        return 200, {"etag": '"written"'}, b""

    server = serve(answer)
    store = s3_store()
    assert [store.put(key, b"content").tag for key in ("a", "b")] == ['"written"'] * 2
    sent = [headers for _, _, headers, _ in server.requests]
    assert ["x-amz-checksum-crc32c" in headers for headers in sent] == [True, False, False]
    assert all(headers["x-amz-content-sha256"] == hashlib.sha256(b"content").hexdigest() for headers in sent)
    assert [headers.get("content-md5") for headers in sent] == [None] + ["mgNkuembtIDdJeHwKEyFVQ=="] * 2


def test_a_small_object_that_was_damaged_on_its_way_is_sent_again_with_its_checksum(serve):
    answers = [(400, {}, b"<Error><Code>BadDigest</Code></Error>"), (200, {"etag": '"written"'}, b"")]
    server = serve(lambda *_: answers.pop(0))
    assert s3_store().put("a", b"content").tag == '"written"'
    assert all("x-amz-checksum-crc32c" in headers for _, _, headers, _ in server.requests)


@pytest.mark.parametrize("code", [b"RequestTimeout", b"SlowDown"])
def test_a_small_object_is_sent_again_with_its_checksum_to_a_server_that_was_busy(serve, code, monkeypatch):
    monkeypatch.setattr("gdsdata.storage.transport._sleep", lambda s: None)
    answers = [(400, {}, b"<Error><Code>" + code + b"</Code></Error>")] + [(200, {"etag": '"written"'}, b"")] * 2
    server = serve(lambda *_: answers.pop(0))
    store = s3_store()
    assert [store.put(key, b"content").tag for key in ("a", "b")] == ['"written"'] * 2
    assert ["x-amz-checksum-crc32c" in headers for _, _, headers, _ in server.requests] == [True] * 3


def test_no_md5_is_computed_of_a_small_object_whose_checksum_is_accepted(serve, monkeypatch):
    monkeypatch.setattr("gdsdata.storage.checksums.md5_base64", lambda body: pytest.fail("it was computed"))
    serve(lambda *_: (200, {"etag": '"written"'}, b""))
    assert s3_store().put("a", b"content").tag == '"written"'


def test_a_small_object_that_is_refused_with_or_without_a_checksum_is_an_error(serve):
    serve(lambda *_: (400, {}, b"<Error><Code>InvalidArgument</Code><Message>no such key</Message></Error>"))
    with pytest.raises(IoError, match="PUT .* 400 InvalidArgument: .no such key"):
        s3_store().put("a", b"content")


def test_an_upload_with_a_missing_part_does_not_appear(serve):
    bucket = Bucket()
    serve(bucket)
    upload = s3_store().upload("key", 40 * 2**20)
    upload.send(0, memoryview(bytes(10)))
    with pytest.raises(ValueError, match="part 1 was not sent"):
        upload.complete()
    upload.abort()
    assert (bucket.objects, bucket.aborted) == ({}, ["up/1"])


def test_an_upload_that_fails_in_a_200_is_an_error(serve):
    bucket = Bucket()
    serve(bucket)
    upload = s3_store().upload("key", 5)
    upload.send(0, memoryview(b"12345"))
    bucket.complete_with = [(200, {}, b"<Error><Code>InvalidPart</Code></Error>")]
    with pytest.raises(IoError, match="InvalidPart"):
        upload.complete()
    bucket.complete_with = [(200, {}, b" \n<Error><Code>InternalError</Code></Error>"), None]
    assert upload.complete().size_bytes == 5


PAGE = b"<html><body>log in to this network</body></html>"


@pytest.mark.parametrize("said", [b"", b" " * 5000, b" " * 5000 + b"<Error><Code>InternalError</Code></Error>", PAGE])
def test_a_200_that_does_not_say_that_an_upload_is_complete_is_sent_again(serve, said):
    bucket = Bucket()
    bucket.objects["/key"] = b"older"
    serve(bucket)
    upload = s3_store().upload("key", 5)
    upload.send(0, memoryview(b"newer"))
    bucket.complete_with = [(200, {}, said), None]
    assert upload.complete().size_bytes == 5
    assert bucket.objects["/key"] == b"newer"


def test_a_page_of_a_proxy_does_not_count_as_a_write(serve):
    serve(lambda *_: (200, {"content-length": str(len(PAGE))}, PAGE))
    for store in s3_store(), azure.make("cont@acc", "az", {"credentials": {"sas": "?sig=1"}}):
        with pytest.raises(CorruptData, match=r"PUT was answered with 200 and no ETag"):
            store.put("key", b"newer")
    upload = store.upload("key", 5)
    upload.send(0, memoryview(b"newer"))
    with pytest.raises(CorruptData, match="no ETag"):
        upload.complete()


def test_a_lost_answer_to_the_completion_is_no_error(serve):
    lost = [(500, {}, b""), (404, {}, b"<Error><Code>NoSuchUpload</Code></Error>")]
    bucket = Bucket()
    serve(bucket)
    upload = s3_store().upload("key", 5)
    upload.send(0, memoryview(b"12345"))
    bucket.complete_with = list(lost)
    with pytest.raises(IoError, match="NoSuchUpload"):  # another object is there, or none
        upload.complete()

    def answer(method, path, query, headers, body):
        if method == "HEAD":
            return 200, {"content-length": "5", "etag": f'"{_tag_of_parts([f"{5:032x}"])}"'}, b""
        return bucket(method, path, query, headers, body)

    bucket.complete_with = list(lost)
    serve(answer)
    assert upload.complete().size_bytes == 5


def test_an_object_is_known_by_its_metadata_if_the_answer_to_its_completion_is_lost(serve):
    bucket, metadata = Bucket(), {}

    def answer(method, path, query, headers, body):
        if "uploads" in query:
            metadata.update((name, value) for name, value in headers.items() if name.startswith("x-amz-meta-"))
        if method == "HEAD":
            return 200, {"content-length": "5", "etag": '"of no parts"', **metadata}, b""
        return bucket(method, path, query, headers, body)

    serve(answer)
    upload = s3_store().upload("key", 5)
    upload.send(0, memoryview(b"12345"))
    lost = [(500, {}, b""), (404, {}, b"<Error><Code>NoSuchUpload</Code></Error>")]
    bucket.complete_with = list(lost)
    assert upload.complete().size_bytes == 5
    metadata.update(dict.fromkeys(metadata, "of another upload"))
    bucket.complete_with = list(lost)
    with pytest.raises(IoError, match="NoSuchUpload"):
        upload.complete()


def test_an_abort_raises_nothing(serve):
    serve(Bucket())
    upload = s3_store().upload("key", 5)
    serve(lambda *_: (403, {}, b""))
    upload.abort()


def test_many_objects_are_deleted_at_once(serve):
    server = serve(lambda *_: b"<DeleteResult><Error><Key>k1</Key><Code>NoSuchKey</Code></Error></DeleteResult>")
    s3_store().delete(f"k<{n}>" for n in range(1500))
    assert [(method, body.count(b"<Key>")) for method, _, _, body in server.requests] == [("POST", 1000), ("POST", 500)]
    assert all("content-md5" in headers for _, _, headers, _ in server.requests)


@pytest.mark.parametrize(("code", "kind"), [("AccessDenied", PermissionError), ("InternalError", IoError)])
def test_an_object_that_was_not_deleted_is_an_error(serve, code, kind):
    serve(lambda *_: f"<DeleteResult><Error><Key>k1</Key><Code>{code}</Code></Error></DeleteResult>".encode())
    with pytest.raises(kind, match=f"s3://bucket/k1: was not deleted: {code}"):
        s3_store().delete(["k1", "k2"])


def test_objects_are_deleted_one_by_one_if_the_server_wants_it(serve):
    def answer(method, path, query, headers, body):
        return (501, {}, b"<Error><Code>NotImplemented</Code></Error>") if method == "POST" else (404, {}, b"")

    server = serve(answer)
    store = s3_store()
    store.delete(["a", "b"])
    store.delete(["c", "d"])
    assert sorted(method for method, *_ in server.requests) == ["DELETE"] * 4 + ["POST"]
    serve(lambda *_: (404, {}, b"<Error><Code>NoSuchBucket</Code></Error>"))
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        store.delete(["a"])


def test_a_refused_head_asks_for_the_reason(serve):
    def answer(method, path, query, headers, body):
        return 403, {}, b"" if method == "HEAD" else b"<Error><Code>InvalidAccessKeyId</Code></Error>"

    serve(answer)
    with pytest.raises(PermissionError, match="InvalidAccessKeyId.*check the credentials"):
        s3_store().head("key")


def test_a_token_that_expired_is_renewed_by_the_head_of_an_empty_object(serve):
    tokens = iter(["old", "new"])

    def answer(method, path, query, headers, body):
        if headers["x-amz-security-token"] == "old":
            return 403, {}, b"" if method == "HEAD" else b"<Error><Code>ExpiredToken</Code></Error>"
        if method == "GET":
            return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"
        return 200, {"content-length": "0", "etag": '"e"'}, b""

    serve(answer)
    store = s3_store(credentials=lambda: {**KEYS, "session_token": next(tokens)})
    store.secrets.current()
    store.secrets._fetched_at -= 60  # seconds: it is not new any more
    assert store.head("empty").size_bytes == 0


def test_azure_blocks_are_listed_in_order(serve):
    server = serve(lambda *_: (201, {"etag": "0x5"}, b""))
    store = azure.make("cont@acc", "az", {"credentials": {"sas": "?sig=1"}})
    upload = store.upload("key", 20 * 2**20)
    upload.send(1, memoryview(b"b"))
    upload.send(0, memoryview(b"a"))
    assert upload.complete() == ObjectInfo("az://cont@acc/key", 20 * 2**20, "0x5")
    blocks = [dict(parse_qsl(urlsplit(url).query))["blockid"] for _, url, _, _ in server.requests[:2]]
    assert re.findall("<Latest>(.*?)</Latest>", server.requests[2][3].decode()) == blocks[::-1]
    assert all(url.endswith("&sig=1") and "content-md5" in headers for _, url, headers, _ in server.requests)


@pytest.mark.parametrize("code", ["InvalidBlobOrBlock", "InvalidBlockList"])
def test_blocks_of_another_program_are_named_as_the_reason(serve, code):
    serve(lambda *_: (400, {"x-ms-error-code": code}, b""))
    with pytest.raises(IoError, match=rf"400 {code}\. Another program"):
        azure.make("cont@acc", "az", {"credentials": {"sas": "?sig=1"}}).put_blocks("key", ["YQ=="])
