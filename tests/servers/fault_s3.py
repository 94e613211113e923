"""The right answers of the fault server, in the S3 dialect."""

import base64
import datetime
import hashlib
import itertools
import re
import urllib.parse
import zlib
from xml.sax.saxutils import escape

from servers.fault_content import Content, Object
from servers.fault_http import Request, Response, http_date

XML = '<?xml version="1.0" encoding="UTF-8"?>\n'
NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
MOST_KEYS = 1000
requests = itertools.count(1)


def request_id() -> dict[str, str]:
    return {"x-amz-request-id": f"REQUEST{next(requests):012}", "Server": "gdsdata-faults"}


def error(status: int, code: str, message: str = "", **headers: str) -> Response:
    """Return an error as S3 has it."""
    given = {**request_id(), "Content-Type": "application/xml"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    identity = given["x-amz-request-id"]
    inside = f"<Code>{code}</Code><Message>{escape(message or code)}</Message><RequestId>{identity}</RequestId>"
    return Response(status, given, f"{XML}<Error>{inside}</Error>".encode())


def xml(name: str, inside: str) -> Response:
    headers = {**request_id(), "Content-Type": "application/xml"}
    return Response(200, headers, f"{XML}<{name} {NAMESPACE}>{inside}</{name}>".encode())


def about(found: Object) -> dict[str, str]:
    """Return the headers that describe a version."""
    modified = http_date(found.modified)
    return {**request_id(), "ETag": f'"{found.etag}"', "Last-Modified": modified, "Accept-Ranges": "bytes"}


def answer(content: Content, request: Request) -> Response:
    """Carry out a request, and return the right response."""
    bucket, _, name = request.key.partition("/")
    methods = {"GET": get, "HEAD": get, "PUT": put, "POST": post, "DELETE": delete}
    if request.method not in methods:
        return error(501, "NotImplemented")
    if name:
        return methods[request.method](content, request)
    if request.method == "GET" and bucket:
        return uploads(content, bucket) if "uploads" in request.query else listing(content, bucket, request)
    return Response(200, request_id())


def get(content: Content, request: Request) -> Response:
    found = content.find(request.key)
    if found is None:
        return error(404, "NoSuchKey", "The specified key does not exist.")
    if not matches(request, "if-match", found):
        return error(412, "PreconditionFailed", ETag=f'"{found.etag}"')
    if "if-none-match" in request.headers and matches(request, "if-none-match", found):
        return Response(304, about(found))
    try:
        part = request.range(found.size)
    except ValueError as reason:
        return error(416, str(reason), Content_Range=f"bytes */{found.size}")
    return ranged(found, part)


def ranged(found: Object, part: tuple[int, int] | None) -> Response:
    """Return offset and length of an object, or None for all of it with status 200."""
    if part is None:
        return Response(200, about(found), pieces=found.pieces(0, found.size))
    offset, length = part
    content_range = f"bytes {offset}-{offset + length - 1}/{found.size}"
    return Response(206, {**about(found), "Content-Range": content_range}, pieces=found.pieces(offset, length))


def matches(request: Request, name: str, found: Object) -> bool:
    """Return whether a condition names the version, or is not there."""
    tags = [tag.strip().removeprefix("W/").strip('"') for tag in request.headers.get(name, "*").split(",")]
    return "*" in tags or found.etag in tags


def wrong_checksum(request: Request) -> bool:
    """Return whether a checksum in a header is not the body's. CRC-32C is not checked."""
    given = {
        "content-md5": lambda body: hashlib.md5(body).digest(),
        "x-amz-checksum-sha256": lambda body: hashlib.sha256(body).digest(),
        "x-amz-checksum-crc32": lambda body: zlib.crc32(body).to_bytes(4, "big"),
    }
    stated = {name: request.headers[name] for name in given if name in request.headers}
    return any(base64.b64encode(given[name](request.body)).decode() != value for name, value in stated.items())


def put(content: Content, request: Request) -> Response:
    if wrong_checksum(request):
        return error(400, "BadDigest")
    if "uploadId" in request.query:
        if request.query["uploadId"] not in content.uploads:
            return error(404, "NoSuchUpload")
        part = content.put_part(request.query["uploadId"], int(request.query["partNumber"]), request.body)
        return Response(200, {**request_id(), "ETag": f'"{part.etag}"'})
    found = content.objects.get(request.key)
    if found and request.headers.get("if-none-match") == "*":
        return error(412, "PreconditionFailed")
    if "if-match" in request.headers and not (found and matches(request, "if-match", found)):
        return error(412, "PreconditionFailed")
    stored = content.put(request.key, request.body)
    return Response(200, {**request_id(), "ETag": f'"{stored.etag}"'})


def post(content: Content, request: Request) -> Response:
    bucket, _, name = request.key.partition("/")
    named = f"<Bucket>{escape(bucket)}</Bucket><Key>{escape(name)}</Key>"
    if "uploads" in request.query:
        upload = content.begin_upload(request.key)
        return xml("InitiateMultipartUploadResult", f"{named}<UploadId>{upload}</UploadId>")
    parts = re.findall(r"<Part>(.*?)</Part>", request.body.decode(), re.DOTALL)
    numbers = [int(re.search(r"<PartNumber>\s*(\d+)", part)[1]) for part in parts]
    etags = [re.search(r"<ETag>(?:\"|&quot;|&#34;)?([\w-]+)", part)[1] for part in parts]
    try:
        found = content.complete(request.query["uploadId"], list(zip(numbers, etags, strict=True)))
    except KeyError:
        return error(404, "NoSuchUpload")
    except ValueError as reason:
        return error(400, str(reason))
    return xml("CompleteMultipartUploadResult", f'{named}<ETag>"{found.etag}"</ETag>')


def delete(content: Content, request: Request) -> Response:
    if "uploadId" in request.query:
        gone = content.uploads.pop(request.query["uploadId"], None)
        return Response(204, request_id()) if gone else error(404, "NoSuchUpload")
    content.objects.pop(request.key, None)
    return Response(204, request_id())


def uploads(content: Content, bucket: str) -> Response:
    mine = [(key, upload) for upload, (key, _) in content.uploads.items() if key.startswith(bucket + "/")]
    entries = [
        f"<Upload><Key>{escape(key.partition('/')[2])}</Key><UploadId>{upload}</UploadId></Upload>"
        for key, upload in mine
    ]
    return xml("ListMultipartUploadsResult", f"<Bucket>{bucket}</Bucket>{''.join(entries)}")


def listing(content: Content, bucket: str, request: Request) -> Response:
    """ListObjectsV2, with prefix, delimiter and pages."""
    query = request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    most = min(int(query.get("max-keys", MOST_KEYS)), MOST_KEYS)
    behind = query.get("continuation-token") or query.get("start-after") or query.get("marker", "")
    encoding = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
    named = urllib.parse.quote if encoding else escape
    entries: list[str] = []
    last, folders = "", set()
    more = False
    for key, found in sorted(content.objects.items()):
        name = key.partition("/")[2]
        folder = folder_of(name, prefix, delimiter)
        entry = folder or name
        if not key.startswith(f"{bucket}/{prefix}") or entry <= behind or entry in folders:
            continue
        if len(entries) >= most:
            more = True
            break
        if folder:
            folders.add(folder)
            entries.append(f"<CommonPrefixes><Prefix>{named(folder)}</Prefix></CommonPrefixes>")
        else:
            entries.append(f"<Contents>{described(named(name), found)}</Contents>")
        last = entry
    then = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
    head = f"<Name>{bucket}</Name><Prefix>{named(prefix)}</Prefix><KeyCount>{len(entries)}</KeyCount>{encoding}"
    cut = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
    return xml("ListBucketResult", f"{head}<MaxKeys>{most}</MaxKeys>{cut}{then}{''.join(entries)}")


def folder_of(name: str, prefix: str, delimiter: str) -> str:
    """Return the common prefix that stands for a key; "" if the key stands for itself."""
    inside, found, _ = name.removeprefix(prefix).partition(delimiter) if delimiter else (name, "", "")
    return f"{prefix}{inside}{found}" if found else ""


def described(name: str, found: Object) -> str:
    when = datetime.datetime.fromtimestamp(found.modified, datetime.timezone.utc)
    modified = when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    etag = f"<ETag>&quot;{found.etag}&quot;</ETag>"
    return f"<Key>{name}</Key><LastModified>{modified}</LastModified>{etag}<Size>{found.size}</Size>"
