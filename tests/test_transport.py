"""Requests with retries: what is tried again, for how long, and what the errors say."""

import errno
import http.server
import pickle
import shutil
import socket
import ssl
import subprocess
import threading
import time
from email.utils import formatdate

import pytest

from gdsdata import _engine
from gdsdata.errors import IoError
from gdsdata.observe.counted import Requests
from gdsdata.storage import failures, transport
from gdsdata.storage.exchange import exchange
from gdsdata.storage.transport import Request, Response

SECRET = "X-Amz-Signature=abcdef0123"
URL = f"https://host.example/bucket/key?{SECRET}"
GET = Request("GET", URL, {"authorization": "Bearer s3cr3t"}, subject="s3://bucket/key")


class Script:
    """Answers of a server, one an attempt; the last one again and again. Time passes in sleeps."""

    def __init__(self, monkeypatch, *answers):
        self.answers = list(answers)
        self.sent, self.slept, self.now = [], [], 0.0
        monkeypatch.setattr(transport, "_attempt", self.attempt)
        monkeypatch.setattr(transport, "_sleep", self.sleep)
        monkeypatch.setattr(transport, "_clock", lambda: self.now)
        monkeypatch.setattr(transport, "_draw", lambda low, high: high)

    def attempt(self, method, url, headers, body, timeout_s, most_bytes):
        self.sent.append((method, url, dict(headers), timeout_s))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        status, headers, body = answer
        return status, headers, body[: most_bytes + 1]

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


OK = (200, {}, b"yes")


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {}, b""),
        (500, {}, b""),
        (502, {}, b"<html>"),
        (503, {}, b"<Error><Code>SlowDown</Code></Error>"),
        (504, {}, b""),
        (425, {}, b""),
        (520, {}, b"<html>"),  # of a gateway
        (400, {}, b"<Error><Code>RequestTimeout</Code></Error>"),
        ConnectionResetError("reset"),
        TimeoutError(),
        ConnectionError("the body ended after 3 of 10 bytes"),
        socket.gaierror(socket.EAI_AGAIN, "again"),
    ],
    ids=str,
)
def test_a_passing_trouble_is_tried_again(monkeypatch, trouble):
    script = Script(monkeypatch, trouble, trouble, OK)
    response = transport.send(GET)
    assert (response.body, response.attempts) == (b"yes", 3)
    assert script.slept == [0.1, 0.2]


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 405, 409, 410, 412, 416, 501, 505, 507])
def test_a_refusal_is_not_tried_again(monkeypatch, status):
    script = Script(monkeypatch, (status, {}, b""))
    with pytest.raises(OSError) as caught:
        transport.send(GET)
    kinds = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError, 410: FileNotFoundError}
    assert type(caught.value) is kinds.get(status, IoError)
    assert len(script.sent) == 1


def test_a_body_that_was_damaged_on_its_way_is_sent_again_a_few_times(monkeypatch):
    damaged = (400, {}, b"<Error><Code>BadDigest</Code></Error>")
    Script(monkeypatch, damaged, damaged, OK)
    assert transport.send(GET).attempts == 3
    script = Script(monkeypatch, damaged)
    with pytest.raises(IoError, match="BadDigest.*after 4 attempts"):
        transport.send(GET)
    assert len(script.sent) == 4


def test_an_expired_secret_is_renewed_once(monkeypatch):
    renewed = []
    for expired in [(403, {}, b"<Error><Code>ExpiredToken</Code></Error>"), (401, {}, b"")]:
        Script(monkeypatch, expired, OK)
        assert transport.send(GET, renew=lambda: renewed.append(1)).attempts == 2
        Script(monkeypatch, expired)
        with pytest.raises(PermissionError, match="after 2 attempts"):
            transport.send(GET, renew=lambda: renewed.append(1))
    assert len(renewed) == 4


def test_each_attempt_is_signed_anew(monkeypatch):
    script = Script(monkeypatch, (503, {}, b""), (503, {}, b""), OK)
    count = iter(range(10))
    transport.send(GET, lambda request: Request(request.method, f"{request.url}&n={next(count)}"))
    assert [url[-4:] for _, url, _, _ in script.sent] == ["&n=0", "&n=1", "&n=2"]


def test_waits_grow_to_a_bound_and_end_at_the_deadline(monkeypatch):
    script = Script(monkeypatch, (503, {}, b""))
    with pytest.raises(IoError, match=r"after \d+ attempts in 1\d\d\.\d s"):
        transport.send(GET, deadline_s=200.0)
    assert script.slept[:4] == [0.1, 0.2, 0.4, 0.8] and max(script.slept) == 20.0
    assert 150 < sum(script.slept) < 200


def test_retry_after_is_waited_for_unless_it_is_too_long(monkeypatch):
    script = Script(monkeypatch, (429, {"retry-after": "7"}, b""), OK)
    transport.send(GET)
    assert script.slept == [7.0]
    script = Script(monkeypatch, (503, {"retry-after": "3600"}, b""), OK)
    with pytest.raises(IoError, match="503"):
        transport.send(GET)
    assert script.slept == []


@pytest.mark.parametrize("wrong_by_s", [-7200, 7200])
def test_a_date_of_retry_after_is_compared_with_the_servers_clock(monkeypatch, wrong_by_s):
    monkeypatch.setattr(transport.time, "time", lambda: 1.7e9 + wrong_by_s)
    headers = {"date": formatdate(1.7e9, usegmt=True), "retry-after": formatdate(1.7e9 + 7, usegmt=True)}
    script = Script(monkeypatch, (503, headers, b""), OK)
    transport.send(GET)
    assert script.slept == [7.0]


def test_a_date_of_retry_after_is_compared_with_ours_if_the_server_has_no_clock(monkeypatch):
    monkeypatch.setattr(transport.time, "time", lambda: 1.7e9)
    headers = {"date": formatdate(5.0, usegmt=True), "retry-after": formatdate(1.7e9 + 7, usegmt=True)}
    script = Script(monkeypatch, (503, headers, b""), OK)
    transport.send(GET)
    assert script.slept == [7.0]


def test_a_server_that_was_never_reached_ends_early(monkeypatch):
    script = Script(monkeypatch, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
    with pytest.raises(IoError, match="Connection refused.*server runs") as caught:
        transport.send(GET)
    assert sum(script.slept) < 15 and caught.value.errno == errno.ECONNREFUSED
    # One that restarts is waited for.
    script = Script(monkeypatch, (503, {}, b""), *[ConnectionRefusedError()] * 8, OK)
    assert transport.send(GET).status == 200 and sum(script.slept) > 15


def test_a_wrong_certificate_is_final_and_named(monkeypatch):
    script = Script(monkeypatch, ssl.SSLCertVerificationError(1, "certificate verify failed"))
    with pytest.raises(IoError, match="certificate.*SSL_CERT_FILE"):
        transport.send(GET)
    assert len(script.sent) == 1


def test_a_malformed_url_is_final_and_named(monkeypatch):
    monkeypatch.setattr(transport, "_sleep", lambda _: pytest.fail("it is tried again"))
    with pytest.raises(IoError, match=r"1 attempt in .*: the URL is malformed.*Check the URL and endpoint") as caught:
        transport.send(Request("GET", "http://127.0.0.1:99999/x.bin?sig=s3cr3t"))
    assert caught.value.errno == errno.EINVAL and "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "code", "remedy"),
    [
        (301, "PermanentRedirect", "region= or AWS_REGION.*no endpoint_url"),
        (403, "InvalidObjectState", "archived: restore it"),
        (403, "SecondLevelDomainForbidden", "addressing=.virtual., or addressing_style of the AWS profile"),
        (403, "PathStyleDomainForbidden", "addressing=.virtual."),
        (403, "InvalidPathAccess", "addressing=.virtual."),
        (403, "AccessDenied", "a signed URL has not ended"),
        (404, "NoSuchKey", "endpoint_url, which must not name the bucket"),
        (404, "NoSuchBucket", "endpoint_url, which must not name it"),
    ],
)
def test_a_refusal_names_the_usual_mistake_behind_it(monkeypatch, status, code, remedy):
    Script(monkeypatch, (status, {}, f"<Error><Code>{code}</Code></Error>".encode()))
    with pytest.raises(OSError, match=f"answered with {status} {code}.*{remedy}"):
        transport.send(GET)


def test_an_error_says_what_was_asked_and_answered_and_what_to_do(monkeypatch):
    message = b"wrong &amp; bad\n  X-Amz-Signature=ff01&amp;b"
    body = b"<Error><Code>SignatureDoesNotMatch</Code><Message>" + message + b"</Message></Error>"
    Script(monkeypatch, (403, {"x-amz-request-id": "REQ1"}, body))
    with pytest.raises(PermissionError) as caught:
        transport.send(GET)
    assert str(caught.value) == (
        "s3://bucket/key: GET https://host.example/bucket/key was answered with 403 SignatureDoesNotMatch: "
        '"wrong & bad X-Amz-Signature=...&b" (request id REQ1). Check the secret key, the region and endpoint_url.'
    )
    assert caught.value.errno == errno.EACCES
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize("name", ["x-amz-request-id", "x-ms-request-id", "x-guploader-uploadid"])
def test_an_error_has_the_request_id_of_each_service(monkeypatch, name):
    Script(monkeypatch, (404, {name: "the-id"}, b""))
    with pytest.raises(FileNotFoundError, match="request id the-id"):
        transport.send(GET)


@pytest.mark.parametrize(
    "answer",
    [
        (403, {}, b"x" * 2**20),
        (500, {}, b"<Error><Message>" + b"m" * 2**16 + b"</Message></Error>"),
        (400, {}, b'<!DOCTYPE a [<!ENTITY b "c">]><Error><Message>&b;</Message></Error>'),
        (400, {"x-request-id": "i" * 60_000}, b"\xff\x00\x1b[31m"),
        ConnectionResetError(f"while sending {URL}"),
        TimeoutError(URL),
    ],
    ids=range(6),
)
def test_errors_are_short_and_show_no_secret(monkeypatch, answer):
    Script(monkeypatch, answer)
    with pytest.raises(OSError) as caught:
        transport.send(GET, deadline_s=5.0)
    text = f"{caught.value}{caught.value!r}{caught.value.__cause__}"
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()
    assert "abcdef0123" not in text and "s3cr3t" not in text
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_requests_and_responses_show_no_secret():
    assert "abcdef" not in repr(GET) and "s3cr3t" not in repr(GET)
    assert "abc" not in repr(Response(200, {"set-cookie": "abc"}, b"abc"))


def test_an_error_names_a_key_whole_and_a_url_of_http_without_its_query():
    assert failures.shown_url("s3://bucket/why?#1") == "s3://bucket/why?#1"
    assert failures.shown_url("https://user:word@host:81/a@b?sig=x#y") == "https://host:81/a@b"


def test_a_clock_that_is_wrong_is_named(monkeypatch):
    body = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
    Script(monkeypatch, (403, {"date": "Fri, 24 May 2013 00:00:00 GMT"}, body))
    with pytest.raises(PermissionError, match=r"clock is \d+ s ahead of the server's\). Set this machine's clock"):
        transport.send(GET)


def test_a_success_with_an_error_in_its_body_is_one(monkeypatch):
    passing = (200, {}, b'<?xml version="1.0"?>\n<Error><Code>InternalError</Code></Error>')
    lasting = (200, {}, b"<Error><Code>InvalidPart</Code><Message>which</Message></Error>")
    script = Script(monkeypatch, passing, OK)
    assert transport.send(GET, result=b"yes").body == b"yes" and len(script.sent) == 2
    Script(monkeypatch, lasting)
    with pytest.raises(IoError, match='200 InvalidPart: "which"'):
        transport.send(GET, result=b"yes")


def test_a_body_without_end_is_refused(monkeypatch):
    Script(monkeypatch, (200, {}, b"x" * 5000))
    with pytest.raises(IoError, match="more than 1000 bytes"):
        transport.send(GET, most_bytes=1000)
    assert len(transport.send(GET, most_bytes=1000, may_be_cut=True).body) == 1000


def test_moves_are_followed_a_few_times_only(monkeypatch):
    script = Script(monkeypatch, (307, {"location": "x"}, b""))
    with pytest.raises(IoError, match="307"):
        transport.send(GET, moved=lambda request, _: request)
    assert len(script.sent) == 6


def test_a_large_body_has_more_time(monkeypatch):
    script = Script(monkeypatch, OK)
    transport.send(Request("PUT", URL, body=bytes(16 * 2**20)))
    transport.send(GET)
    assert script.sent[0][3] > 60 and script.sent[1][3] == 30


# ------------------------------------------------------------------------------------------------ one exchange


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    connections = 0

    def setup(self):
        super().setup()
        type(self).connections += 1

    def do_GET(self):
        kind = self.path.partition("?")[0].strip("/")
        self.send_response(200)
        if kind == "short":
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"only this")
            self.close_connection = True
        elif kind == "endless":
            self.send_header("Content-Length", str(10**12))
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(65536))
            except OSError:
                self.close_connection = True
        elif kind == "drip":
            self.send_header("Content-Length", "1000")
            self.end_headers()
            try:
                for _ in range(1000):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            except OSError:
                self.close_connection = True
        elif kind == "closing":  # says nothing of it
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")
            self.close_connection = True
        else:
            said = f"{self.path} {sorted(self.headers.keys())}".encode()
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    Handler.connections = 0
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def get(url, timeout_s=5.0, most_bytes=2**20):
    return exchange("GET", url, {}, b"", timeout_s, most_bytes)


def test_an_exchange_sends_what_it_is_asked_to_send(server):
    status, headers, body = exchange("GET", f"{server}/a%2Fb?c=d%20e", {"x-one": "1"}, b"", 5.0, 1000)
    assert (status, body.decode()) == (200, "/a%2Fb?c=d%20e ['Accept', 'Host', 'x-one']")
    assert headers["content-length"] == str(len(body))
    content = memoryview(bytearray(range(256)) * 4096)
    assert exchange("PUT", f"{server}/k", {}, content, 5.0, 2**21)[2] == content
    assert exchange("PUT", f"{server}/k", {}, b"", 5.0, 2**21)[2] == b""


def test_connections_are_kept(server):
    for _ in range(5):
        get(f"{server}/echo")
    assert Handler.connections == 1


def test_a_kept_connection_that_was_closed_is_replaced(server):
    for _ in range(5):
        assert get(f"{server}/closing")[2] == b"ok"
        time.sleep(0.01)
    assert Handler.connections == 5


def test_a_short_body_is_an_error(server):
    with pytest.raises(ConnectionError, match="91 bytes"):
        get(f"{server}/short")


def test_an_endless_body_is_cut(server):
    assert len(get(f"{server}/endless")[2]) == 2**20 + 1
    assert get(f"{server}/echo")[0] == 200


def test_a_body_that_drips_is_ended_in_time(server):
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        get(f"{server}/drip", timeout_s=0.3)
    assert time.monotonic() - begun < 2


def test_a_proxy_of_the_environment_is_used(server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.replace("http://", "http://user:pass%20word@"))
    said = get("http://far.example/key?q=1")[2].decode()
    assert said == "http://far.example/key?q=1 ['Accept', 'Host', 'Proxy-Authorization', 'Proxy-Connection']"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert get(f"{server}/near")[2].startswith(b"/near")


def test_a_certificate_must_be_that_of_a_known_authority(server, monkeypatch, tmp_path):
    openssl = shutil.which("openssl") or pytest.skip("openssl, which makes the certificate, is not installed")
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost", *files]
    subprocess.run([*made, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    running.socket = tls.wrap_socket(running.socket, server_side=True, do_handshake_on_connect=False)
    threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
    url = f"https://localhost:{running.server_port}/key"
    try:
        _engine.configure_http()  # a new client, which looks at the environment
        with pytest.raises(IoError, match="GET https://localhost.*certificate is not accepted.*SSL_CERT_FILE"):
            transport.send(Request("GET", url))
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        _engine.configure_http()
        assert transport.send(Request("GET", url)).status == 200
        with pytest.raises(IoError, match="certificate is not accepted"):  # another name
            transport.send(Request("GET", url.replace("localhost", "127.0.0.1")))
        for preferred in ("SSL_CERT_FILE", "AWS_CA_BUNDLE"):
            monkeypatch.delenv(preferred, raising=False)
        hashed = subprocess.run(
            [openssl, "x509", "-hash", "-noout", "-in", tmp_path / "cert.pem"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        (tmp_path / "folder").mkdir()
        shutil.copy(tmp_path / "cert.pem", tmp_path / "folder" / f"{hashed.strip()}.0")
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "folder"))
        _engine.configure_http()
        assert transport.send(Request("GET", url)).status == 200
    finally:
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        _engine.configure_http()
        running.shutdown()
        running.server_close()


def test_no_server_at_the_address(server):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            get(f"http://127.0.0.1:{free.getsockname()[1]}/")
    with pytest.raises(OSError):
        get(f"http://{'a' * 70}.example/")


def test_a_server_without_tls_is_named_soon(server, monkeypatch):
    slept = []
    monkeypatch.setattr(transport, "_sleep", slept.append)
    monkeypatch.setattr(transport, "_clock", lambda: sum(slept))
    with pytest.raises(IoError, match=r"no TLS connection was made: .*If the server has no TLS, .* with http://"):
        transport.send(Request("GET", f"{server.replace('http://', 'https://')}/key", subject="s3://bucket/key"))
    assert sum(slept) < 15


@pytest.mark.parametrize("place", ["message", "code", "request id", "location"])
def test_a_server_that_repeats_what_signed_a_request_shows_no_secret(monkeypatch, place):
    token = "t0ken/of+this=request"
    said = {"code": f"<Code>{token}</Code>", "message": f"<Code>Denied</Code><Message>of {token}, no</Message>"}
    headers = {"x-request-id": token} if place == "request id" else {}
    Script(monkeypatch, (403, headers, f"<Error>{said.get(place, '')}</Error>".encode()))
    moved = Request("GET", f"https://host.example/{token}", subject="s3://bucket/key")
    request = moved if place == "location" else Request("GET", "https://host.example/key", subject="s3://bucket/key")

    def sign(unsigned):
        return Request(unsigned.method, unsigned.url, {"authorization": f"Bearer {token}"}, b"", unsigned.subject)

    with pytest.raises(PermissionError, match=r"\.\.\.") as caught:
        transport.send(request, sign)
    assert token not in str(caught.value)


@pytest.mark.parametrize(
    "date", ["Thu, 01 Jan 99999999999999999999 00:00:00 GMT", "never", "Mon, 01 Jan 0001 00:00:00 +2359"]
)
def test_a_date_that_is_none_is_no_date(monkeypatch, date):
    script = Script(monkeypatch, (503, {"retry-after": date}, b""), OK)
    assert transport.send(GET).status == 200 and len(script.sent) == 2
    Script(monkeypatch, (403, {"date": date}, b""))
    with pytest.raises(PermissionError, match="403"):
        transport.send(GET)


def test_requests_are_counted_for_the_live_view(monkeypatch):
    counts = Requests()
    monkeypatch.setattr(transport, "store_requests", counts)
    Script(monkeypatch, (503, {}, b""), OK)
    transport.send(Request("PUT", URL, body=b"four"))
    Script(monkeypatch, (404, {}, b"none"))
    transport.send(GET, accept={404})
    with pytest.raises(FileNotFoundError):
        transport.send(GET)
    assert counts.snapshot() == {"requests": 3, "retries": 1, "sent_bytes": 4, "received_bytes": 7}


def test_a_process_without_descriptors_learns_which_limit_to_raise(monkeypatch):
    lacking = ConnectionError(errno.EMFILE, "no connection can be opened: Too many open files")
    Script(monkeypatch, lacking)
    with pytest.raises(IoError, match=r"no connection can be opened.*ulimit -n") as caught:
        transport.send(GET)
    assert caught.value.errno == errno.EMFILE and "server runs" not in str(caught.value)
