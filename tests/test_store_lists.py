"""Lists of stores, and index files of web servers: pages, and what a hostile server may not do."""

import contextlib
import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_answers import s3_store, serving

from gdsdata.errors import CorruptData, IoError
from gdsdata.storage import listing, xml_document
from gdsdata.storage.store import ObjectInfo
from gdsdata.storage.stores import azure, web


@pytest.fixture
def serve(monkeypatch):
    return serving(monkeypatch)


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
        s3_page([("p/a%00/etc/passwd", 1)]),
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
    ids=range(19),
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


@pytest.mark.parametrize(
    "line",
    [
        "../up.tar",
        "%2e%2e/up.tar",
        "%2e%2e?x",
        "..#x",
        "x%00y",
        "http://[",
        "/etc/passwd",
        "file:///etc/passwd",
        "s3://bucket/key",
        "a/../../b",
    ],
)
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
        ((206, {"content-range": "Bytes 0-0/1234", "content-length": "1"}, b"x"), 1234),  # the unit has no case
        ((200, {"content-length": "77"}, b"x" * 77), 77),
        ((200, {"content-length": str(2**40)}, b"x" * (17 * 2**20)), 2**40),
        ((416, {"content-range": "bytes */0"}, b""), 0),
    ],
    ids=range(5),
)
def test_a_size_is_found_where_head_is_refused(serve, answer, size_bytes):
    serve(lambda method, *_: (403, {}, b"") if method == "HEAD" else answer)
    assert web.make("host", "https", {}).head("key?X-Amz-Signature=1").size_bytes == size_bytes


@pytest.mark.parametrize(
    "headers",
    [
        {"content-range": "bytes 0-0/*", "content-length": "1"},
        {"content-length": "1"},
        {"content-type": "multipart/byteranges; boundary=b", "content-length": "90"},
    ],
)
def test_the_length_of_a_part_is_not_taken_for_the_objects_size(serve, headers):
    serve(lambda method, *_: (405, {}, b"") if method == "HEAD" else (206, headers, b"x"))
    with pytest.raises(CorruptData, match="does not say the object's size"):
        web.make("host", "https", {}).head("key")


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
