"""The fault server gives right bytes, the faults that it is asked for, and honest counts."""

import contextlib
import http.client
import json
import random
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from helpers import MIB, REPOSITORY, random_bytes
from servers.fault_content import PERIOD, made
from servers.fault_http import Request, Response
from servers.fault_kinds import APPLY, KINDS, Plan
from servers.faults import BUCKET, FaultServer, Link, certificate

SIZE = 3 * MIB


@pytest.fixture
def server():
    with FaultServer() as running:
        running.make("made.bin", SIZE)
        yield running


def ask(server, key="made.bin", part=(0, 1000), method="GET", body=None, query="", **headers):
    """Return status, headers and body of one request on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    if part:
        headers["Range"] = f"bytes={part[0]}-{part[0] + part[1] - 1}"
    try:
        connection.request(method, f"/{BUCKET}/{key}{query}", body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def client_of(server):
    import botocore.config
    import botocore.session

    config = botocore.config.Config(
        signature_version="s3v4", s3={"addressing_style": "path"}, retries={"max_attempts": 0}
    )
    return botocore.session.Session().create_client(
        "s3", endpoint_url=server.endpoint_url, aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key, region_name=server.region, config=config,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------- right answers


def test_made_content_follows_from_key_version_and_offset():
    whole = made("a", 0, PERIOD + 1000)
    assert made("a", PERIOD - 10, 20) == whole[PERIOD - 10 : PERIOD + 10]
    assert made("a", 0, 100) != made("b", 0, 100) != made("b", 0, 100, version=2)
    assert whole[:100] not in whole[1 : 2**20]


def test_a_range_is_answered_with_206_and_its_bytes(server):
    status, headers, body = ask(server, part=(MIB, 5000))
    assert (status, headers["Content-Range"]) == (206, f"bytes {MIB}-{MIB + 4999}/{SIZE}")
    assert body == server.content("made.bin", MIB, 5000) == made(f"{BUCKET}/made.bin", MIB, 5000)
    assert ask(server, part=None)[2] == server.content("made.bin")
    assert ask(server, part=(SIZE - 10, 1000))[2] == server.content("made.bin", SIZE - 10)
    assert ask(server, part=(SIZE, 1))[0] == 416
    assert ask(server, "none.bin")[0] == 404
    assert ask(server, "made/1000/any/name.bin")[2] == made(f"{BUCKET}/made/1000/any/name.bin", 0, 1000)


def test_a_replaced_object_has_another_etag_and_other_bytes(server):
    _, before, old = ask(server)
    server.make("made.bin", SIZE)
    _, after, new = ask(server)
    assert (before["ETag"], old) != (after["ETag"], new)
    assert ask(server, If_Match=before["ETag"])[0] == 206  # "If_Match" is no header of HTTP
    assert ask(server, **{"If-Match": before["ETag"]})[0] == 412
    assert ask(server, **{"If-Match": after["ETag"]})[2] == new
    assert ask(server, **{"If-None-Match": after["ETag"]})[0] == 304


def test_botocore_reads_writes_and_lists(server):
    client = client_of(server)
    names = [f"folder/{number:02}.bin" for number in range(25)]
    for name in names:
        client.put_object(Bucket=BUCKET, Key=name, Body=name.encode())
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, Prefix="folder/", PaginationConfig={"PageSize": 10}
    )
    found = [one for page in pages for one in page["Contents"]]
    assert [(one["Key"], one["Size"]) for one in found] == [(name, len(name)) for name in names]
    listing = client.list_objects_v2(Bucket=BUCKET, Delimiter="/")
    assert [one["Prefix"] for one in listing["CommonPrefixes"]] == ["folder/"]
    assert [one["Key"] for one in listing["Contents"]] == ["made.bin"]
    assert client.head_object(Bucket=BUCKET, Key=names[3])["ETag"] == found[3]["ETag"]
    client.delete_object(Bucket=BUCKET, Key=names[3])
    assert server.names("folder/") == names[:3] + names[4:]
    assert client.get_object(Bucket=BUCKET, Key=names[4])["Body"].read() == names[4].encode()


def test_a_multipart_upload_is_whole_or_not_there(server):
    client, content = client_of(server), random_bytes(11 * MIB)
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="parts.bin")["UploadId"]
    named = {"Bucket": BUCKET, "Key": "parts.bin", "UploadId": upload}
    parts = []
    for number, at in enumerate(range(0, len(content), 5 * MIB), 1):
        sent = client.upload_part(**named, PartNumber=number, Body=content[at : at + 5 * MIB])
        parts.append({"PartNumber": number, "ETag": sent["ETag"]})
    assert server.uploads() == ["parts.bin"] and "parts.bin" not in server.names()
    with pytest.raises(client.exceptions.ClientError, match="InvalidPart"):
        client.complete_multipart_upload(**named, MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": '"no"'}]})
    client.complete_multipart_upload(**named, MultipartUpload={"Parts": parts})
    assert server.get("parts.bin") == content and server.uploads() == []
    other = client.create_multipart_upload(Bucket=BUCKET, Key="other.bin")["UploadId"]
    client.abort_multipart_upload(Bucket=BUCKET, Key="other.bin", UploadId=other)
    assert server.uploads() == []


def test_a_wrong_checksum_of_a_write_is_refused(server):
    headers = {"x-amz-checksum-crc32": "AAAAAA=="}
    assert ask(server, "put.bin", None, "PUT", b"bytes", **headers)[0] == 400
    assert "put.bin" not in server.names()


def test_requests_without_a_signature_are_refused_if_asked_for(server):
    server.link.signed = True
    assert ask(server)[0] == 403
    assert client_of(server).get_object(Bucket=BUCKET, Key="made.bin", Range="bytes=0-9")["Body"].read()


# ------------------------------------------------------------------------------------------- faults


def test_a_scripted_fault_comes_once_and_only_to_its_key(server):
    server.fail_next("status_503_retry_after", key="made.bin")
    assert ask(server, "made/10/other.bin")[0] == 206
    status, headers, body = ask(server)
    assert (status, headers["Retry-After"]) == (503, "1") and b"<Code>SlowDown</Code>" in body
    assert ask(server)[0] == 206
    with pytest.raises(ValueError, match="unknown faults"):
        server.fail_next("no such fault")


@pytest.mark.parametrize("kind", ["reset_before", "reset_within", "close_before", "short"])
def test_connections_that_break(server, kind):
    server.fail_next(kind)
    with pytest.raises((ConnectionError, http.client.HTTPException)) as caught:
        ask(server, part=(0, MIB))
    assert (caught.type is ConnectionResetError) == kind.startswith("reset")
    if kind == "short":
        assert 0 < len(caught.value.partial) < MIB
    assert ask(server)[0] == 206
    assert server.counts()["faults"] == {kind: 1}


@pytest.mark.parametrize("kind", ["silence", "stall"])
def test_connections_that_stand_still(server, kind):
    server.fail_next(kind)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"GET /{BUCKET}/made.bin HTTP/1.1\r\nRange: bytes=0-999999\r\n\r\n".encode())
        client.settimeout(0.2)
        received = b""
        with pytest.raises(TimeoutError):
            while True:
                received += client.recv(2**20)
    assert len(received) < 900_000 and bool(received) == (kind == "stall")


def test_slow_bytes_are_right_bytes(server):
    server.plan.slow_bytes_per_s = 20_000
    server.fail_next("slow")
    began = time.monotonic()
    assert ask(server, part=(5, 6000))[2] == server.content("made.bin", 5, 6000)
    assert time.monotonic() - began > 0.15


def test_answers_with_other_bytes_than_were_asked_for(server):
    asked, etag = (1000, 500), ask(server)[1]["ETag"]
    for kind in ("wrong_range", "whole", "other_version", "short_length", "chunked"):
        server.fail_next(kind)
    status, headers, body = ask(server, part=asked)
    assert (status, headers["Content-Range"]) == (206, f"bytes 1001-1500/{SIZE}")
    assert body == server.content("made.bin", 1001, 500)
    status, headers, body = ask(server, part=asked)
    assert (status, len(body)) == (200, SIZE) and "Content-Range" not in headers
    status, headers, body = ask(server, part=asked, **{"If-Match": etag})
    assert (status, headers["Content-Range"]) == (206, f"bytes 1000-1499/{SIZE}")
    assert headers["ETag"] != etag and body != server.content("made.bin", *asked)
    status, headers, body = ask(server, part=asked)
    assert (headers["Content-Range"], headers["Content-Length"]) == (f"bytes 1000-1499/{SIZE}", "250")
    status, headers, body = ask(server, part=asked)
    assert body == server.content("made.bin", *asked) and "Content-Length" not in headers
    assert ask(server, part=asked)[2] == server.content("made.bin", *asked)


def test_headers_that_are_no_headers(server):
    server.fail_next("garbage_headers")
    with pytest.raises(http.client.HTTPException):
        ask(server)
    server.fail_next("huge_headers")
    with pytest.raises(http.client.LineTooLong):
        ask(server)
    assert ask(server)[0] == 206


def test_a_signature_that_has_expired_stays_so(server):
    client, other = client_of(server), {"Authorization": "of another moment"}
    url = client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": "made.bin"})
    server.fail_next("expired")
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url)
    assert ask(server, **other)[0] == 206
    server.expire_signatures()
    assert ask(server, **other)[0] == 403
    assert ask(server)[0] == 206


def test_a_write_is_not_carried_out_unless_its_answer_is_lost(server):
    server.fail_next("reset_before")
    with pytest.raises(ConnectionError):
        ask(server, "put.bin", None, "PUT", b"bytes")
    assert "put.bin" not in server.names()
    server.fail_next("status_500")
    assert ask(server, "put.bin", None, "PUT", b"bytes")[0] == 500
    assert "put.bin" not in server.names()
    server.fail_next("reset_after")
    with pytest.raises(ConnectionError):
        ask(server, "put.bin", None, "PUT", b"bytes")
    assert server.get("put.bin") == b"bytes"


def test_an_upload_may_end_with_an_error_in_a_200(server):
    client = client_of(server)
    upload = client.create_multipart_upload(Bucket=BUCKET, Key="parts.bin")["UploadId"]
    sent = client.upload_part(Bucket=BUCKET, Key="parts.bin", UploadId=upload, PartNumber=1, Body=b"part")
    body = f"<Part><PartNumber>1</PartNumber><ETag>{sent['ETag']}</ETag></Part>"
    server.fail_next("error_in_200")
    status, _, answer = ask(server, "parts.bin", None, "POST", body, f"?uploadId={upload}")
    assert status == 200 and b"<Error><Code>InternalError" in answer and "parts.bin" not in server.names()
    status, _, answer = ask(server, "parts.bin", None, "POST", body, f"?uploadId={upload}")
    assert status == 200 and server.get("parts.bin") == b"part"
    assert ask(server, "parts.bin", None, "POST", body, f"?uploadId={upload}")[0] == 200  # once more, as S3


def drawn(plan, requests):
    response = Response(206, pieces=[(0, 1)])
    found = {}
    for number in requests:
        request = Request("GET", f"/{BUCKET}/made.bin", {"range": f"bytes={number}-"})
        found[number] = plan.draw(request, lambda name, request=request: APPLY[name](request, response))
    return found


def test_the_faults_of_a_seed_do_not_depend_on_the_order_of_requests():
    numbers = list(range(1000))
    shuffled = random.Random(0).sample(numbers, len(numbers))
    settings = {"share": 0.3, "kinds": ("reset_before", "short", "status_503")}
    first = drawn(Plan(seed=7, **settings), numbers)
    assert first == dict(sorted(drawn(Plan(seed=7, **settings), shuffled).items()))
    assert first != drawn(Plan(seed=8, **settings), numbers)
    assert 250 < sum(map(bool, first.values())) < 350


def test_a_request_gets_no_more_faults_in_a_row_than_the_plan_says():
    plan = Plan(share=1.0, kinds=("short",), in_a_row=3)
    assert [drawn(plan, [5])[5] for _ in range(5)] == ["short"] * 3 + [""] * 2


def test_a_storm_takes_the_requests_behind_it_too():
    plan = Plan(seed=1, share=0.01, kinds=("status_503",), storm=20)
    faults = "".join("x" if name else "." for name in drawn(plan, range(1000)).values())
    assert faults.count("x" * 21) >= 3 and re.sub("x{21,}", "", faults).count("x") <= 20


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_server_goes_on_after_every_fault(server, kind):
    server.plan = Plan(share=1.0, kinds=(kind,), stall_s=0.1, in_a_row=None, huge_header_bytes=100)
    for method, key, query in (("GET", "made.bin", ""), ("PUT", "put.bin", ""), ("HEAD", "made.bin", "")):
        with contextlib.suppress(OSError, http.client.HTTPException):
            ask(server, key, (0, 100), method, b"" if method == "PUT" else None, query)
    server.plan = Plan()
    assert ask(server)[2] == server.content("made.bin", 0, 1000)


# ------------------------------------------------------------------------------------------- counts, link, TLS


def test_counts_say_what_was_fetched_and_which_connections_are_open(server):
    first, second = (http.client.HTTPConnection("127.0.0.1", server.port) for _ in range(2))
    for connection in (first, second, first):
        connection.request("GET", f"/{BUCKET}/made.bin", headers={"Range": "bytes=0-99"})
        connection.getresponse().read()
    counts = server.counts()
    expected = {"requests": 3, "ranges": 3, "bytes": 300, "connections": 2, "open": 2, "most_open": 2}
    assert {name: counts[name] for name in expected} == expected
    first.close()
    second.close()
    asked = json.loads(urllib.request.urlopen(f"{server.endpoint_url}/-/counts").read())
    assert asked["connections"] == 2 and asked["bytes"] == 300
    server.forget()
    assert server.counts()["requests"] == 0


def test_a_link_delays_requests_and_paces_each_connection(server):
    server.link = Link(delay_s=0.05, bytes_per_s=10e6)
    began = time.monotonic()
    assert ask(server, part=(0, MIB))[2] == server.content("made.bin", 0, MIB)
    assert 0.05 + 0.8 * MIB / 10e6 < time.monotonic() - began < 2


def test_a_certificate_of_another_host_is_seen(tmp_path):
    context, trusted = certificate(tmp_path)
    with FaultServer(tls=context) as server:
        server.make("made.bin", 4096)  # asyncio may cut a long answer when it closes a TLS connection
        client = ssl.create_default_context(cafile=trusted)
        with urllib.request.urlopen(server.url("made.bin", "https"), context=client) as answer:
            assert answer.read() == server.content("made.bin")
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(server.url("made.bin", "https"))
    context, trusted = certificate(tmp_path, "storage.example.com")
    with FaultServer(tls=context) as server, pytest.raises(urllib.error.URLError, match="IP address mismatch"):
        urllib.request.urlopen(server.endpoint_url, context=ssl.create_default_context(cafile=trusted))


def test_the_server_runs_as_a_process_too():
    command = [sys.executable, "tests/servers/faults.py", "--delay-ms", "1", "--mbit-per-s", "800"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            url = process.stdout.readline().strip()
            plan = json.dumps({"scripted": [["status_404", ""]]}).encode()
            urllib.request.urlopen(urllib.request.Request(f"{url}/-/plan", plan, method="PUT"))
            with pytest.raises(urllib.error.HTTPError, match="404"):
                urllib.request.urlopen(f"{url}/bucket/made/1000/a")
            assert urllib.request.urlopen(f"{url}/bucket/made/1000/a").read() == made("bucket/made/1000/a", 0, 1000)
        finally:
            process.kill()
