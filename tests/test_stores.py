"""Stores without a server: the requests they send, and what they make of any answer."""

import contextlib
import errno
import re
import threading
import time
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdsdata.errors import CorruptData, IoError
from gdsdata.storage import listing, transport, xml_document
from gdsdata.storage.location import Location, location_of
from gdsdata.storage.store import ObjectInfo
from gdsdata.storage.stores import azure, configure, gcs, s3, store_of, web
from gdsdata.storage.stores.xml_store import _tag_of_parts, part_bytes_of

KEYS = {"access_key_id": "id", "secret_access_key": "secret"}


class Server:
    """Answers each request by a function of (method, path, query, headers, body), and keeps it."""

    def __init__(self, monkeypatch, answer):
        self.requests = []
        self.answer = answer
        self.lock = threading.Lock()
        monkeypatch.setattr(transport, "_attempt", self.attempt)
        monkeypatch.setattr(transport, "_sleep", lambda seconds: None)

    def attempt(self, method, url, headers, body, timeout_s, most_bytes):
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        with self.lock:
            self.requests.append((method, url, dict(headers), bytes(body)))
            answer = self.answer(method, unquote(parts.path), query, headers, bytes(body))
        status, headers, body = (200, {}, answer) if isinstance(answer, bytes) else answer
        return status, headers, body[: most_bytes + 1]


@pytest.fixture
def serve(monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    return lambda answer: Server(monkeypatch, answer)


def s3_store(bucket="bucket", **options):
    return s3.make(bucket, "s3", {"credentials": KEYS, "region": "eu-west-1", **options})


def no_request(*_):
    raise AssertionError("no request should be sent")


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
        (s3, "s3", "bucket", {"endpoint_url": "http://u:p@h"}, "endpoint_url='h'"),
        (s3, "s3", "bucket", {"endpoint_url": "http://h:99999"}, "the port"),
        (s3, "s3", "bucket", {"addressing": "dns"}, "choose 'auto', 'path' or 'virtual'"),
        (s3, "s3", "user@evil", {}, "a bucket's name"),
        (gcs, "gs", "UPPER", {}, "a bucket's name"),
        (azure, "az", "container", {}, "AZURE_STORAGE_ACCOUNT"),
        (azure, "az", "container@evil/", {}, "small letters"),
        (web, "https", "user:word@host", {}, "pass headers="),
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


def test_an_azure_account_is_named_in_the_url():
    assert location_of("az://c@acc.blob.core.windows.net/a/b") == Location("az", "c@acc.blob.core.windows.net", "a/b")
    for bucket in ("cont@acc", "cont@acc.blob.core.windows.net", "cont@acc.dfs.core.windows.net"):
        store = azure.make(bucket, "az", {"credentials": "anonymous"})
        assert store.access("a b").url == "https://acc.blob.core.windows.net/cont/a%20b"


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
        return 200, {"content-length": "1"}, b""

    server = serve(answer)
    assert s3_store("with.dots").put("key", b"x").size_bytes == 1
    assert server.requests[1][1] == "https://s3.us-west-2.amazonaws.com/with.dots/key"


def test_a_region_that_nothing_names_is_asked_for(serve):
    server = serve(lambda *_: (403, {"x-amz-bucket-region": "sa-east-1"}, b""))
    store = s3_store(region=None)
    assert store.access("key").url.startswith("https://bucket.s3.sa-east-1.amazonaws.com/key?")
    assert [(method, headers) for method, _, headers, _ in server.requests] == [("HEAD", {})]


def test_a_server_of_ones_own_sends_nobody_elsewhere(serve):
    server = serve(lambda *_: (301, {"x-amz-bucket-region": "evil"}, b""))
    with pytest.raises(IoError, match="301"):
        s3_store(endpoint_url="http://h").put("key", b"")
    assert len(server.requests) == 1


# ------------------------------------------------------------------------------------------------------------- lists


def s3_page(keys=(), prefixes=(), following="", encode=str):
    objects = "".join(
        f'<Contents><Key>{encode(key)}</Key><Size>{size}</Size><ETag>"t{size}"</ETag></Contents>' for key, size in keys
    )
    common = "".join(f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in prefixes)
    more = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{following}</NextContinuationToken>"
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<EncodingType>url</EncodingType>{objects}{common}{more if following else ''}</ListBucketResult>"
    ).encode()


def test_pages_are_asked_for_as_they_are_needed(serve):
    pages = {
        "": s3_page([("p/a", 1), ("p/c", 2)], ["p/b/"], "t/2"),
        "t/2": s3_page(following="t3"),
        "t3": s3_page([("p/d+e%2Bf", 3)]),
    }
    server = serve(lambda method, path, query, headers, body: pages[query.get("continuation-token", "")])
    found = s3_store().list("p/", "/")
    assert next(found) == ObjectInfo("s3://bucket/p/a", 1, '"t1"')
    assert len(server.requests) == 1
    assert list(found) == [
        "p/b/",
        ObjectInfo("s3://bucket/p/c", 2, '"t2"'),
        ObjectInfo("s3://bucket/p/d e+f", 3, '"t3"'),
    ]
    assert len(server.requests) == 3


def test_azure_pages(serve):
    def answer(method, path, query, headers, body):
        assert (path, query["restype"], query["comp"], query["prefix"]) == ("/cont", "container", "list", "p/")
        blob = (
            "<Blob><Name{}>{}</Name><Properties><Content-Length>{}</Content-Length><Etag>0x1</Etag></Properties></Blob>"
        )
        first = blob.format("", "p/a", 1) + "<BlobPrefix><Name>p/b/</Name></BlobPrefix>"
        folder = "<Blob><Name>p/dir</Name><Properties><ResourceType>directory</ResourceType></Properties></Blob>"
        last = folder + blob.format(' Encoded="true"', "p/d%01", 2)
        marker = "" if "marker" in query else "<NextMarker>m</NextMarker>"
        content = f"<Blobs>{last if 'marker' in query else first}</Blobs>{marker}"
        return f"\ufeff<?xml version='1.0'?><EnumerationResults>{content}</EnumerationResults>".encode()

    serve(answer)
    store = azure.make("cont@acc", "az", {"credentials": "anonymous"})
    names = [one if isinstance(one, str) else one.url for one in store.list("p/", "/")]
    assert names == ["az://cont@acc/p/a", "p/b/", "az://cont@acc/p/d\x01"]


@pytest.mark.parametrize(
    "body",
    [
        s3_page([("other/a", 1)]),
        s3_page([("p/../../etc", 1)]),
        s3_page([("p/..", 1)]),
        s3_page([], ["/"]),
        s3_page([("p/a", -1)]),
        s3_page([("p/a", 10**30)]),
        s3_page([("p/%ff", 1)]),
        s3_page(following="same"),
        b"",
        b"<html>",
        b"<html></html>",
        b"\x00\x01",
        b'<!DOCTYPE x [<!ENTITY a "p/a">]><ListBucketResult><Contents><Key>&a;</Key></Contents></ListBucketResult>',
        b'<?xml version="1.0" encoding="utf-7"?><ListBucketResult/>',
        b"<a>" * 1000,
        b"<ListBucketResult " + b"".join(b'a%d="" ' % n for n in range(100_000)) + b"/>",
        b"<ListBucketResult>" + b"<a/>" * 400_000 + b"</ListBucketResult>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    ],
    ids=range(18),
)
def test_a_hostile_list_is_refused(serve, body):
    serve(lambda *_: body)
    with pytest.raises(CorruptData, match="s3://bucket/p/.*Check endpoint_url"):
        list(s3_store().list("p/"))


def test_a_list_without_end_is_refused(serve):
    serve(lambda *_: (200, {}, b" " * (20 * 2**20)))
    with pytest.raises(IoError, match="more than 16777216 bytes"):
        list(s3_store().list(""))


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_xml_or_a_value_error(body):
    with contextlib.suppress(ValueError):
        xml_document.parse(b"<a>" + body + b"</a>")


@given(st.text(max_size=20), st.text(max_size=40))
@settings(deadline=None)
def test_no_listed_key_leaves_its_prefix(prefix, key):
    try:
        listing.check_key("s3://bucket/", prefix, key)
    except CorruptData:
        return
    assert key.startswith(prefix) and not {".", ".."} & set(key.split("/"))


def test_a_tag_is_the_date_if_there_is_no_etag():
    assert listing.http_date("2009-10-12T17:50:30.000Z") == "Mon, 12 Oct 2009 17:50:30 GMT"
    assert listing.http_date("yesterday") == ""


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


def test_a_lost_answer_to_the_completion_is_no_error(serve):
    lost = [(500, {}, b""), (404, {}, b"<Error><Code>NoSuchUpload</Code></Error>")]
    bucket = Bucket()
    serve(bucket)
    upload = s3_store().upload("key", 5)
    upload.send(0, memoryview(b"12345"))
    bucket.complete_with = list(lost)
    with pytest.raises(FileNotFoundError, match="NoSuchUpload"):  # another object is there, or none
        upload.complete()

    def answer(method, path, query, headers, body):
        if method == "HEAD":
            return 200, {"content-length": "5", "etag": f'"{_tag_of_parts([f"{5:032x}"])}"'}, b""
        return bucket(method, path, query, headers, body)

    bucket.complete_with = list(lost)
    serve(answer)
    assert upload.complete().size_bytes == 5


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


# --------------------------------------------------------------------------------------------------------------- web


def test_an_index_file_names_objects(serve):
    def answer(method, path, query, headers, body):
        assert ("authorization" in headers) == ("//host/" in server.requests[-1][1])
        if path == "/data/index.txt":
            return b"# shards\na.tar\nsub/b%20c.tar?x=1\n\nhttps://other/c.tar\n"
        return 200, {"content-length": str(len(path)), "etag": '"e"'}, b""

    server = serve(answer)
    store = web.make("host", "https", {"headers": {"authorization": "mine"}})
    assert [(one.url, one.size_bytes) for one in store.list("data/index.txt")] == [
        ("https://host/data/a.tar", 11),
        ("https://host/data/sub/b%20c.tar?x=1", 17),
        ("https://other/c.tar", 6),
    ]


@pytest.mark.parametrize("line", ["../up.tar", "/etc/passwd", "file:///etc/passwd", "s3://bucket/key", "a/../../b"])
def test_an_index_file_leads_nowhere_else(serve, line):
    serve(lambda *_: f"a.tar\n{line}\n".encode())
    with pytest.raises(CorruptData, match="index.txt, line 2"):
        list(web.make("host", "https", {}).list("index.txt"))


@pytest.mark.parametrize("body", [b"<html></html>", b"\x00\x01", b"\xff\xfe", b'{"a": 1}'])
def test_a_page_that_is_no_index_file_is_refused(serve, body):
    serve(lambda *_: body)
    with pytest.raises(ValueError, match="https://host/folder/: web servers have no list"):
        list(web.make("host", "https", {}).list("folder/?token=secret"))


@pytest.mark.parametrize(
    ("answer", "size_bytes"),
    [
        ((206, {"content-range": "bytes 0-0/1234", "content-length": "1"}, b"x"), 1234),
        ((200, {"content-length": "77"}, b"x" * 77), 77),
        ((200, {"content-length": str(2**40)}, b"x" * (17 * 2**20)), 2**40),
        ((416, {"content-range": "bytes */0"}, b""), 0),
    ],
    ids=range(4),
)
def test_a_size_is_found_where_head_is_refused(serve, answer, size_bytes):
    serve(lambda method, *_: (403, {}, b"") if method == "HEAD" else answer)
    assert web.make("host", "https", {}).head("key?X-Amz-Signature=1").size_bytes == size_bytes


def test_a_redirect_is_followed_without_this_host_s_headers(serve):
    def answer(method, path, query, headers, body):
        if path == "/key":
            return 302, {"location": "https://cdn.example/real?sig=1"}, b""
        assert "authorization" not in headers
        return 200, {"content-length": "3"}, b""

    serve(answer)
    assert web.make("host", "https", {"credentials": {"token": "t"}}).head("key").size_bytes == 3
    serve(lambda *_: (302, {"location": "http://plain.example/real"}, b""))
    with pytest.raises(IoError, match="302"):  # never from https to http
        web.make("host", "https", {}).head("key")


def test_urls_are_sent_as_they_are_written(serve):
    access = web.make("host:81", "http", {"headers": {"a": "b"}}).access("a b%20c/ü?x=1&y=%2F#part")
    assert (access.url, access.headers) == ("http://host:81/a%20b%20c/%C3%BC?x=1&y=%2F", {"a": "b"})


def test_nothing_is_written_to_the_web():
    store = web.make("host", "https", {})
    for write in (lambda: store.put("key", b""), lambda: store.upload("key", 1), lambda: store.delete(["key"])):
        with pytest.raises(IoError, match="write to s3://") as caught:
            write()
        assert caught.value.errno == errno.EROFS
