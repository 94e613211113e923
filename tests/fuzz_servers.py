"""Lists and other answers of a hostile server: targets of `fuzz.py`.

An input is a folder of answers, in the order of requests.
"""

import contextlib
import functools
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fuzz_target import Target, each

from gdsdata.formats import remote_listing
from gdsdata.storage import failures, listing, prefetch, stores, transport, xml_document
from gdsdata.storage.paths import JoinedPaths, ends_of, joined
from gdsdata.storage.store import ObjectInfo, Store
from gdsdata.storage.stores import azure, gcs, s3, web, xml_store

SECRET = "tHe-sEcReT-0123456789"
_PREFIX = "a/"
_NAMED = ("s3://bucket", "gs://bucket", "az://container", "http://", "https://")

# ------------------------------------------------------------------------------------------------------- answers


def write_answers(folder: Path, *answers: tuple[int, Mapping[str, str], str]) -> None:
    """Write answers: the status and headers a line each, an empty line, and the body."""
    for number, (status, headers, body) in enumerate(answers):
        head = "".join(f"{name}: {value}\n" for name, value in headers.items())
        (folder / f"{number}.http").write_bytes(f"{status}\n{head}\n{body}".encode())


class _Answers:
    """The server: it gives each request the next answer, and at their end refuses all."""

    def __init__(self, folder: Path) -> None:
        self._answers = [path.read_bytes() for path in sorted(folder.glob("*.http"))]
        self._lock = threading.Lock()  # guards _answers
        self.now_s = 0.0

    def attempt(
        self, method: str, url: str, headers: Mapping[str, str], body: object, timeout_s: float, most_bytes: int
    ) -> tuple[int, dict[str, str], bytes]:
        with self._lock:
            answer = self._answers.pop(0) if self._answers else b"403\n\n"
        head, _, content = answer.partition(b"\n\n")
        said, *lines = head.decode("latin-1").split("\n")
        found = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if colon:
                found[name.strip().lower()] = value.strip()
        status = int(said) if re.fullmatch("[1-9][0-9]{2}", said) else 200
        return status, found, b"" if method == "HEAD" else content[: most_bytes + 1]

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@contextlib.contextmanager
def _answered(folder: Path) -> Iterator[None]:
    """Have the answers in a folder come to the requests of this block. No time passes in it."""
    server = _Answers(folder)
    replaced = {
        "_attempt": server.attempt,
        "_sleep": server.sleep,
        "_clock": lambda: server.now_s,
        "_draw": lambda low, high: high,
    }
    before = {name: getattr(transport, name) for name in replaced}
    for name, value in replaced.items():
        setattr(transport, name, value)
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)) + repr(error)
        assert SECRET not in text, "an error shows a secret"
        raise
    finally:
        for name, value in before.items():
            setattr(transport, name, value)


@functools.cache
def _stores() -> dict[str, Store]:
    keys = {"access_key_id": "id", "secret_access_key": "key", "session_token": SECRET}
    server = {"endpoint_url": "http://server"}
    return {
        "s3://bucket/": s3.make("bucket", "s3", {**server, "credentials": keys, "region": "r"}),
        "gs://bucket/": gcs.make("bucket", "gs", {**server, "credentials": {"token": SECRET}}),
        "az://container/": azure.make("container", "az", {**server, "account": "acc", "credentials": {"sas": _SAS}}),
        "http://server/": web.make("server", "http", {"credentials": {"token": SECRET}, "headers": {"x-key": SECRET}}),
    }


_SAS = f"sv=2021&sig={SECRET}"
_TAG = '"0123456789abcdef"'

# --------------------------------------------------------------------------------------------------------- lists

_CONTENTS = "<Contents><Key>{0}</Key><Size>{1}</Size><ETag>&quot;e{1}&quot;</ETag></Contents>"
_S3_END = "<IsTruncated>{}</IsTruncated><NextContinuationToken>next</NextContinuationToken></ListBucketResult>"
_BLOB = (
    "<Blob><Name>{0}</Name><Properties><Content-Length>{1}</Content-Length><Etag>e{1}</Etag>"
    "<ResourceType>file</ResourceType></Properties></Blob>"
)
_UNTAGGED = "<Contents><Key>a/u</Key><Size>0</Size><LastModified>2026-01-02T03:04:05.000Z</LastModified></Contents>"


def _s3_page(*keys: str, more: bool = False, encoding: str = "<EncodingType>url</EncodingType>") -> str:
    contents = "".join(_CONTENTS.format(key, size) for size, key in enumerate(keys))
    folders = "<CommonPrefixes><Prefix>a/b/</Prefix></CommonPrefixes>"
    begin = f'<?xml version="1.0"?>\n<ListBucketResult xmlns="http://s3/">{encoding}'
    return begin + contents + _UNTAGGED + folders + _S3_END.format(str(more).lower())


def _azure_page(*keys: str, marker: str = "") -> str:
    blobs = "".join(_BLOB.format(key, size) for size, key in enumerate(keys))
    folder = '<BlobPrefix><Name Encoded="true">a%2Fb%2F</Name></BlobPrefix>'
    return f"<EnumerationResults><Blobs>{blobs}{folder}</Blobs><NextMarker>{marker}</NextMarker></EnumerationResults>"


def _listed(base: str, store: Store, prefix: str, delimiter: str) -> None:
    urls = []
    for entry in store.list(prefix, delimiter):
        if isinstance(entry, ObjectInfo):
            _check_info(entry)
            urls.append(entry.url)
            entry = entry.url.removeprefix(base)
        assert entry.startswith(prefix), "a key is outside its prefix"
        assert not {".", ".."} & set(entry.split("/")), "a key leaves its folder"
    _check_paths(urls)


def _check_info(info: ObjectInfo) -> None:
    assert 0 <= info.size_bytes < 2**63 and 0 <= info.version < 2**63 and isinstance(info.tag, str)


def _check_paths(urls: list[str]) -> None:
    if urls:
        kept = joined(urls)
        assert list(JoinedPaths(kept, ends_of(kept))) == urls, "an index has other paths than the list"


def _expanded(folder: Path, base: str, store: Store, pattern: str) -> None:
    """Expand a glob or a folder as the source of a data set."""
    scheme, _, bucket = base.rstrip("/").partition("://")
    stores._stores[scheme, bucket] = store
    with _answered(folder):
        found = remote_listing.files_of_urls([base + pattern])
        assert all(url.startswith(base + _PREFIX) for url in found[base + pattern]), "a file is outside its prefix"


def read_lists(folder: Path) -> None:
    def one(base: str, prefix: str, delimiter: str) -> None:
        with _answered(folder):
            _listed(base, _stores()[base], prefix, delimiter)

    bases = [base for base in _stores() if not base.startswith("http")]
    each(
        [
            *(functools.partial(one, base, *how) for base in bases for how in ((_PREFIX, ""), (_PREFIX, "/"))),
            *(
                functools.partial(_expanded, folder, base, _stores()[base], pattern)
                for base in bases
                for pattern in ("a/", "a/**/*.tar", "a/[a-c]*")
            ),
        ]
    )


_XML_TOKENS = (
    *(b"&amp;", b"&#0;", b"&#x110000;", b"<!DOCTYPE a>", b"<![CDATA[", b"]]>", b"<a>", b"</a>", b"<a ", b"/>"),
    *(b"%00", b"%2e%2e%2f", b"a/../", b"a/./", b"../", b"//", b"\xff", b"\0", b"%", b"%ff", b"+", b"a/"),
    *(b"<Key>", b"</Key>", b"<Size>", b"-1", b"9" * 19, b"9" * 5000, b"1e5", b"\xd9\xa3", b"true", b"false"),
    *(b"0001-01-01T00:00:00+23:59", b"9999-12-31T23:59:59-23:59", b"<Error><Code>SlowDown</Code></Error>"),
    *(b"200\n", b"301\n", b"400\n", b"403\n", b"404\n", b"503\n", b"\n\n"),
)

LISTS = Target(
    "server-lists",
    (xml_document, listing, xml_store, azure, remote_listing),
    [
        lambda folder: write_answers(
            folder, (200, {}, _s3_page("a/x.tar", "a/b%20c", more=True)), (200, {}, _s3_page())
        ),
        lambda folder: write_answers(folder, (200, {}, _s3_page("a/é", "a/b/c/y.tar", encoding=""))),
        lambda folder: write_answers(
            folder, (200, {}, _azure_page("a/x", "a/y", marker="m")), (200, {}, _azure_page())
        ),
        lambda folder: write_answers(folder, (403, {}, _refusal_xml("ExpiredToken")), (200, {}, _s3_page("a/x"))),
        lambda folder: write_answers(folder, (200, {}, _s3_page("a/x.tar%00/etc/passwd"))),
        lambda folder: write_answers(folder, (200, {}, _s3_page(f"a/{'b/' * 3000}x.tar"))),
        lambda folder: write_answers(folder, (200, {}, _s3_page().replace("2026-01-02", "0001-01-01"))),
    ],
    read_lists,
    tokens=_XML_TOKENS,
    refusals=(PermissionError,),
    named=_NAMED,
)

# ------------------------------------------------------------------------------------------- headers and refusals


def _refusal_xml(code: str, message: str = "no &amp; no") -> str:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message><Region>r2</Region></Error>"


def _uploaded(store: Store) -> None:
    upload = store.upload("a/x", 5)
    upload.send(0, memoryview(b"12345"))
    info = upload.complete()
    _check_info(info)
    upload.abort()


def read_answers(folder: Path) -> None:
    """Ask each store for everything that it does, and give the same answers each time."""
    wanted = ObjectInfo("s3://bucket/a/x", 5, _TAG)

    def one(ask: Callable[[Store], Any], store: Store) -> None:
        with _answered(folder):
            found = ask(store)
            if isinstance(found, ObjectInfo):
                _check_info(found)

    asked: list[Callable[[Store], Any]] = [
        lambda store: store.head("a/x"),
        lambda store: store.put("a/x", b"12345"),
        lambda store: store.delete(["a/x", "a/y"]),
        _uploaded,
        lambda store: prefetch._read_range(store, "a/x", wanted, 0, 5),
    ]
    each(functools.partial(one, ask, store) for store in _stores().values() for ask in asked)


_HEADERS = {
    "content-length": "5",
    "etag": _TAG,
    "last-modified": "Thu, 01 Jan 2026 00:00:00 GMT",
    "content-range": "bytes 0-4/5",
}
_REFUSED = {
    "date": "Thu, 01 Jan 2026 00:00:00 GMT",
    "retry-after": "3",
    "x-amz-request-id": "REQUEST1",
    "x-ms-error-code": "BlobNotFound",
    "location": "http://server/elsewhere",
    "x-amz-bucket-region": "r3",
    "content-type": "application/xml",
}

_NO_DATE = "Thu, 01 Jan 99999999999999999999 00:00:00 GMT"

ANSWERS = Target(
    "server-answers",
    (transport, failures, xml_store, azure, web, xml_document),
    [
        lambda folder: write_answers(folder, *[(206, _HEADERS, "12345")] * 3),
        lambda folder: write_answers(folder, (403, _REFUSED, _refusal_xml("AccessDenied"))),
        lambda folder: write_answers(folder, (400, _REFUSED, _refusal_xml("ExpiredToken")), (200, _HEADERS, "12345")),
        lambda folder: write_answers(folder, (503, _REFUSED, f"slow down, {SECRET}"), (404, _REFUSED, "")),
        lambda folder: write_answers(folder, (302, _REFUSED, ""), (416, {"content-range": "bytes */0"}, "")),
        lambda folder: write_answers(
            folder,
            (200, {"x-amz-checksum-algorithm": "CRC32C"}, "<R><UploadId>id</UploadId></R>"),
            (200, _HEADERS, ""),
            (200, {}, _refusal_xml("InternalError", SECRET)),
            (404, {}, _refusal_xml("NoSuchUpload")),
            (200, _HEADERS, ""),
        ),
        lambda folder: write_answers(folder, (200, {**_HEADERS, "content-length": "9" * 5000}, "")),
        lambda folder: write_answers(
            folder,
            (503, {"retry-after": _NO_DATE}, ""),
            (302, {"location": "http://["}, ""),
            (403, {"date": _NO_DATE}, ""),
        ),
        lambda folder: write_answers(
            folder, (200, {}, "<DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code></Error></DeleteResult>")
        ),
    ],
    read_answers,
    tokens=(
        *_XML_TOKENS,
        *(_NO_DATE.encode(), b"Thu, 01 Jan 0001 00:00:00 +2359", b"retry-after: "),
        *(b"http://[", b"http://other/", b"//", b"file:///etc/passwd", b"bytes */", b"bytes 0-4/", b"location: "),
        *(
            b"etag: ",
            b"date: ",
            b"content-length: ",
            b"content-range: ",
            b"x-request-id: ",
            b"ExpiredToken",
            SECRET.encode(),
        ),
    ),
    refusals=(PermissionError,),
    named=_NAMED,
)


def read_web_index(folder: Path) -> None:
    """Read a text file with URLs, and the head of each."""
    with _answered(folder):
        urls = []
        for info in _stores()["http://server/"].list("d/list.txt"):
            assert isinstance(info, ObjectInfo)
            _check_info(info)
            path = unquote(info.url.partition("?")[0])
            is_below = path.startswith("http://server/d/") and listing.is_plain(path)
            is_whole = re.match(r"https?://[^/]", info.url) is not None
            assert is_below or (is_whole and info.url.encode() in (folder / "0.http").read_bytes()), "an odd URL"
            urls.append(info.url)
        _check_paths(urls)


WEB_INDEX = Target(
    "server-index",
    (web, transport),
    [
        lambda folder: write_answers(
            folder, (200, {}, "# a list\nx.bin\nb/c d.bin?v=1\nhttps://other/y\n"), *[(200, _HEADERS, "")] * 3
        ),
        lambda folder: write_answers(folder, (200, {"content-type": "text/html"}, "<html></html>")),
        lambda folder: write_answers(folder, (200, {}, "%2e%2e/x"), (200, _HEADERS, "")),
        lambda folder: write_answers(folder, (200, {}, "http://["), (200, _HEADERS, "")),
    ],
    read_web_index,
    tokens=(*_XML_TOKENS, b"http://", b"https://h/", b"http://[", b"http://u:p@h/", b"?", b"#", b"\r", b"\xe2\x80\xa8"),
    refusals=(PermissionError,),
    named=_NAMED,
)
