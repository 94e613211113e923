"""The doctor of URLs: each line with its evidence, each no with its remedy, and never a secret."""

import contextlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from email.utils import formatdate

import pytest
from servers.fault_kinds import Plan
from servers.faults import FaultServer, certificate

from gdsdata import doctor
from gdsdata.doctor import __main__ as program
from gdsdata.doctor import url_checks, url_probes
from gdsdata.doctor.evidence import RecordedHost
from gdsdata.doctor.place import Place
from gdsdata.errors import IoError
from gdsdata.io import engine
from gdsdata.storage import stores
from gdsdata.storage.stores.s3 import S3Store

MIB = 2**20
NAMES = [check.__name__ for checks in doctor.URL_CHECKS.values() for check in checks]
VARIABLES = (
    *("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION"),
    *("AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_CREDENTIAL_EXPIRATION", "GDSDATA_CACHE", "SSL_CERT_FILE"),
    *("http_proxy", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"),
)


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    """Give each test an environment without stores, and a measurement that is short."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(url_probes, "STEP_S", 0.05)
    monkeypatch.setattr(url_probes, "STEPS", (1, 4))
    stores._stores.clear()
    yield
    stores._stores.clear()


@pytest.fixture
def faults(monkeypatch):
    with FaultServer() as server:
        use(monkeypatch, server.environment())
        yield server


def use(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def answers(url):
    found = {finding.name: finding for finding in doctor.examine(url)}
    assert list(found) == NAMES
    assert all(one.evidence and (one.remedy or one.answer != "no") for one in found.values())
    return found


def test_a_server_that_works_has_no_no(faults):
    found = answers(faults.make("x.bin", 8 * MIB))
    assert [one.name for one in found.values() if one.answer == "no"] == []
    assert "libcurl/" in found["libcurl"].evidence
    assert found["one_range"].evidence.startswith(f"206, bytes 0-65535/{8 * MIB}, ETag ")
    assert "gdsdata-faults, request id REQUEST" in found["one_range"].evidence
    assert found["dns"].evidence.startswith("127.0.0.1 is 127.0.0.1")
    assert "HEAD" in found["round_trip"].evidence and "GB/s with" in found["throughput"].evidence
    assert "1: " in found["throughput"].evidence and "4: " in found["throughput"].evidence
    assert found["credentials"].evidence == "Keys, from AWS_ACCESS_KEY_ID in the environment"
    assert "us-east-1" in found["region"].evidence


@pytest.mark.parametrize(
    ("name", "kind", "by"),
    [("seaweedfs", "Keys", "SeaweedFS"), ("rclone", "Keys", "AmazonS3"), ("azurite", "SharedAccess", "Azurite")],
)
def test_a_real_server_is_read(request, monkeypatch, name, kind, by):
    server = request.getfixturevalue(name)
    use(monkeypatch, server.environment())
    found = answers(server.put("doctor/x.bin", bytes(MIB)))
    assert [one for one in found.values() if one.answer == "no"] == []
    assert by in found["one_range"].evidence and "2 s" in found["clock"].evidence
    assert found["credentials"].evidence.startswith(f"{kind}, from A")
    assert found["throughput"].answer == "yes"


def test_a_server_of_gcs_is_read(gcs, monkeypatch):
    use(monkeypatch, gcs.environment())
    found = answers(gcs.put("doctor/x.bin", bytes(MIB)))
    assert [one for one in found.values() if one.answer == "no"] == []
    assert "STORAGE_EMULATOR_HOST" in found["credentials"].evidence


def test_the_largest_object_of_a_folder_or_a_glob_is_read(faults):
    for key, size in (("d/a.bin", 10), ("d/b.bin", 300), ("e.bin", 5000)):
        faults.put(key, bytes(size))
    for url in ("s3://bucket/d/", "s3://bucket/d/*.bin"):
        assert "bytes 0-299/300" in answers(url)["one_range"].evidence
    nothing = answers("s3://bucket/none/")
    assert nothing["one_range"].answer == "no" and "no object" in nothing["one_range"].evidence


def test_too_few_bytes_are_not_measured(faults):
    found = answers(faults.put("short.bin", bytes(500)))
    assert found["one_range"].answer == "yes" and found["throughput"].answer == "unknown"
    assert "500 bytes" in found["throughput"].evidence
    empty = answers(faults.put("empty.bin", b""))["one_range"]
    assert empty.answer == "no" and "empty" in empty.remedy


@pytest.mark.parametrize(
    ("kind", "evidence", "remedy"),
    [
        ("status_403", "403 AccessDenied", "credentials allow"),
        ("status_404", "404 NoSuchKey", "Check the URL"),
        ("status_503", "503 SlowDown", "throttles"),
        ("whole", "200 with the whole object", "serves ranges"),
        ("wrong_range", "Content-Range bytes 1-", "proxy"),
        ("reset_before", "reset", "network"),
    ],
)
def test_a_wrong_answer_for_a_range_is_reported_with_its_remedy(faults, kind, evidence, remedy):
    url = faults.make("x.bin", MIB)
    faults.fail_next(kind, 50)
    found = answers(url)
    assert found["one_range"].answer == "no" and found["throughput"].answer == "unknown"
    assert evidence.lower() in found["one_range"].evidence.lower() and remedy in found["one_range"].remedy


def test_a_server_that_throttles_is_named(faults):
    first, way = url_probes._get(faults.make("x.bin", MIB), 0, 100)
    faults.plan = Plan(seed=1, share=0.5, kinds=("status_503",), in_a_row=None)
    row = url_probes._Step(way, first.total_bytes, 2**18).run(2)
    assert 0 < row["throttled"] < row["requests"] and row["gb_per_s"] > 0 and row["failed"] == 0
    sound = {
        "status": 206,
        "bytes": 1,
        "length": 1,
        "total_bytes": 9,
        "content_range": "bytes 0-0/9",
        "tag": "x",
        "took_s": 0,
    }
    evidence = {"one_range": {**sound, "server": "", "request_id": ""}, "throughput": {"rows": [row]}}
    found = url_checks.throughput(_Evidence(evidence), Place("s3://bucket/x"))
    assert found.answer == "no" and f"throttled {row['throttled']} of" in found.evidence
    assert "higher limit" in found.remedy


class _Evidence(RecordedHost):
    """A host that is known by the results of its probes."""

    def __init__(self, probes):
        super().__init__("/nonexistent")
        self.probes = {"dns": {"host": "x"}, **probes}

    def probe(self, name, path=""):
        return self.probes.get(name)


def test_a_dead_host_is_a_no_within_its_time():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.perf_counter()
    found = answers(f"http://127.0.0.1:{port}/x.bin")
    assert time.perf_counter() - began < 5
    assert found["one_range"].answer == "no" and "server runs" in found["one_range"].remedy
    assert found["clock"].answer == found["round_trip"].answer == "unknown"


def test_tls_to_a_port_that_refuses_is_a_no():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = answers(f"https://127.0.0.1:{port}/x.bin")["tls"]
    assert found.answer == "no" and "refused" in found.evidence and "speaks TLS" in found.remedy


def test_a_host_without_an_address_is_a_no():
    found = answers("https://no-such-host.invalid/x.bin")
    assert found["dns"].answer == "no" and "no-such-host.invalid" in found["dns"].evidence
    assert found["one_range"].answer == "no" and "DNS" in found["one_range"].remedy


def test_a_silent_server_does_not_hold_the_doctor(faults, monkeypatch):
    monkeypatch.setattr(url_probes, "EXCHANGE_S", 0.3)
    url = faults.make("x.bin", MIB)
    faults.fail_next("silence", 10)
    began = time.perf_counter()
    found = answers(url)
    assert time.perf_counter() - began < 5
    assert found["one_range"].answer == "no" and "in time" in found["one_range"].evidence


@contextlib.contextmanager
def with_tls(folder, monkeypatch, name="127.0.0.1", trusted=True):
    context, path = certificate(folder, name)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
    engine.configure_http()  # a client that reads the variable anew
    try:
        with FaultServer(tls=context) as server:
            yield server
    finally:
        engine.configure_http()


def test_a_certificate_that_is_accepted_has_authority_and_end(tmp_path, monkeypatch):
    with with_tls(tmp_path, monkeypatch) as server:
        server.make("x.bin", MIB)
        found = answers(server.url("x.bin", "https"))
    assert found["tls"].answer == "yes" and found["tls"].evidence.startswith("TLSv1.3, by 127.0.0.1, ends 2")
    assert "renewed" in found["tls"].remedy  # it ends tomorrow
    assert found["one_range"].answer == "yes"


@pytest.mark.parametrize(("name", "trusted"), [("elsewhere.test", True), ("127.0.0.1", False)])
def test_a_certificate_that_is_wrong_is_a_no(tmp_path, monkeypatch, name, trusted):
    with with_tls(tmp_path, monkeypatch, name, trusted) as server:
        server.make("x.bin", MIB)
        found = answers(server.url("x.bin", "https"))
    assert found["tls"].answer == "no" and "SSL_CERT_FILE" in found["tls"].remedy
    assert ("match" in found["tls"].evidence) == trusted
    assert found["one_range"].answer == "no" and "certificate" in found["one_range"].evidence


def test_without_an_address_the_certificate_is_not_blamed():
    host = doctor.ThisHost(
        {
            "dns": lambda url: {"host": "gone.test", "error": "Name or service not known"},
            "tls": lambda url: {"error": "Name or service not known"},
        },
        {"dns": 5.0, "tls": 5.0},
    )
    place = Place("https://gone.test/x")
    assert url_checks.dns(host, place).answer == "no"
    assert url_checks.tls(host, place).answer == "unknown"


def test_a_folder_of_authorities_is_read_as_the_engine_reads_it(tmp_path, monkeypatch):
    with with_tls(tmp_path, monkeypatch) as server:
        folder = tmp_path / "authorities"
        folder.mkdir()
        shutil.copy(os.environ["SSL_CERT_FILE"], folder / "one.pem")
        subprocess.run(["openssl", "rehash", str(folder)], check=True)
        monkeypatch.setenv("SSL_CERT_FILE", str(folder))
        engine.configure_http()
        server.make("x.bin", MIB)
        found = answers(server.url("x.bin", "https"))
    assert found["tls"].answer == "yes" and found["one_range"].answer == "yes"


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_file_of_authorities_that_cannot_be_read_is_named_with_its_variable(tmp_path, monkeypatch, content):
    path = tmp_path / "authorities.pem"
    if content is not None:
        path.write_bytes(content)
    with with_tls(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
        server.make("x.bin", MIB)
        found = answers(server.url("x.bin", "https"))["tls"]
    assert found.answer == "no" and f"SSL_CERT_FILE names '{path}'" in found.evidence
    assert "SSL_CERT_FILE" in found.remedy


class _Web(http.server.BaseHTTPRequestHandler):
    """A web server of one object, whose clock is an hour behind, and that knows ranges or not."""

    protocol_version = "HTTP/1.1"
    knows_ranges = True

    def date_time_string(self, timestamp=None):
        return formatdate(time.time() - 3600, usegmt=True)

    def do_GET(self):
        content, status, begin, end = bytes(MIB), 200, 0, MIB
        if self.knows_ranges and (said := self.headers.get("Range")):
            first, _, last = said.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, MIB), 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{MIB}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content[begin:end])

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web(handler=_Web):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_clock_that_is_wrong_is_a_no():
    with web() as address:
        found = answers(f"{address}/x.bin")
    assert found["clock"].answer == "no" and "ahead of the server" in found["clock"].evidence
    assert 3590 < int(found["clock"].evidence.split()[3]) < 3610 and "timedatectl" in found["clock"].remedy
    assert found["one_range"].answer == "yes" and "ETag" in found["one_range"].remedy


def test_a_server_without_ranges_is_a_no():
    with web(type("Whole", (_Web,), {"knows_ranges": False})) as address:
        found = answers(f"{address}/x.bin")
    assert found["one_range"].answer == "no" and "serves ranges" in found["one_range"].remedy


def test_a_proxy_is_named_without_its_password(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://user:PASSWORD@127.0.0.1:9")
    found = answers("https://bucket.example.invalid/x.bin")
    assert found["proxy"].answer == "no" and "http://127.0.0.1:9" in found["proxy"].evidence
    assert "NO_PROXY" in found["proxy"].remedy and "PASSWORD" not in str(found)
    assert found["tls"].answer == "unknown" and "proxy" in found["tls"].evidence
    monkeypatch.setenv("no_proxy", "example.invalid")
    assert answers("https://bucket.example.invalid/x.bin")["proxy"].answer == "yes"


# As curl 7.88.1 has them.
@pytest.mark.parametrize(
    ("no_proxy", "host", "passes"),
    [
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("x,127.0.0.0/31", "127.0.0.1", True),
        ("127.0.0.9/31", "127.0.0.1", False),
        ("x 127.0.0.0/8", "127.0.0.1", True),
        ("127.0.0.1/32", "127.0.0.1", True),
        ("127.0.0.1/0", "127.0.0.1", True),
        ("0.0.0.0/0", "127.0.0.1", False),
        ("127.0.0.0/40", "127.0.0.1", False),
        ("127.0.0.0/255.0.0.0", "127.0.0.1", False),
        (".0.0.1", "127.0.0.1", False),
        ("fd00::/8", "fd12::1", True),
        ("fd00::/8", "127.0.0.1", False),
        ("127.0.0.0/8", "localhost", False),
        ("host, localhost", "localhost", True),
        ("localhost.", "localhost", True),
        (".Example.com", "a.example.com", True),
        ("example.com", "anexample.com", False),
        ("*", "a.example.com", True),
        ("x,*", "a.example.com", False),
        ("", "a.example.com", False),
    ],
)
def test_hosts_that_pass_the_proxy_are_those_of_libcurl(no_proxy, host, passes):
    assert url_probes.passes_proxy(no_proxy, host, knows_ranges=True) == passes


def test_an_older_libcurl_knows_no_ranges_of_addresses():
    assert not url_probes.passes_proxy("10.0.0.0/8", "10.1.2.3", knows_ranges=False)
    assert url_probes.passes_proxy("10.1.2.3", "10.1.2.3", knows_ranges=False)


@pytest.mark.parametrize(("version", "passes"), [("7.85.0", False), ("7.86.0", True), ("8.14.1", True)])
def test_a_range_of_addresses_passes_the_proxy_if_libcurl_knows_it(monkeypatch, version, passes):
    monkeypatch.setattr(url_probes, "_libcurl_words", lambda: f"libcurl/{version} OpenSSL/3.0.19")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    assert url_probes.proxy("http://10.1.2.3/x.bin")["proxy"] == ("" if passes else "http://127.0.0.1:9")


def test_missing_credentials_are_a_no_and_those_that_end_say_when(faults, monkeypatch):
    url = faults.make("x.bin", MIB)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "TOKEN")
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", "2099-01-02T03:04:05Z")
    stores._stores.clear()
    found = answers(url)["credentials"]
    assert found.answer == "yes" and "2099-01-02 03:04:05 UTC" in found.evidence
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", "2020-01-02T03:04:05Z")
    stores._stores.clear()
    found = answers(url)["credentials"]
    assert found.answer == "no" and "ended 2020-01-02" in found.evidence
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    stores._stores.clear()
    found = answers(url)["credentials"]
    assert (
        found.answer == "no" and "no credentials were found" in found.evidence and "AWS_ACCESS_KEY_ID" in found.remedy
    )


def test_libcurl_that_is_missing_is_a_no_with_its_remedy(monkeypatch):
    monkeypatch.setattr(engine, "http_refusal", lambda: "URLs are read with libcurl, and none is installed; install it")
    found = url_checks.libcurl(doctor.this_host(), Place("s3://bucket/x"))
    assert found.answer == "no" and found.evidence.endswith("none is installed") and found.remedy == "install it"


def test_the_cache_is_looked_at_and_not_made(faults, tmp_path, monkeypatch):
    url = faults.make("x.bin", MIB)
    monkeypatch.setenv("GDSDATA_CACHE", str(tmp_path / "cache"))
    found = answers(url)["cache_folder"]
    assert "GB free" in found.evidence and "blocks will have 1 MiB" in found.evidence
    assert not (tmp_path / "cache").exists()
    engine.BlockCache(str(tmp_path / "cache"), 10**9, MIB)
    found = answers(url)["cache_folder"]
    assert "holds 0.00 of at most 1.0 GB in blocks of 1 MiB" in found.evidence


def test_a_cache_behind_a_network_file_system_in_user_space_is_a_no(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("50 1 0:60 / /shared rw - fuse.glusterfs server:/volume rw\n")
    (tmp_path / "environ").write_text("GDSDATA_CACHE=/shared/cache\n")
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes/cache.json").write_text('{"free_bytes": 1000000000000, "may_write": true}')
    found = url_checks.cache_folder(doctor.RecordedHost(tmp_path), Place("s3://bucket/x"))
    assert found.answer == "no" and "fuse.glusterfs" in found.evidence and "behind a network" in found.remedy


def test_the_cache_may_be_a_file_url_or_relative_and_no_other_url(faults, tmp_path, monkeypatch):
    url, folder = faults.make("x.bin", MIB), tmp_path / "cache"
    engine.BlockCache(str(folder), 10**9, MIB)
    monkeypatch.chdir(tmp_path)
    for said in (f"file://{folder}", "cache"):
        monkeypatch.setenv("GDSDATA_CACHE", said)
        evidence = answers(url)["cache_folder"].evidence
        assert evidence.startswith(f"{folder} on ") and "unknown" not in evidence and "holds" in evidence
    monkeypatch.setenv("GDSDATA_CACHE", "s3://bucket/cache")
    found = answers(url)["cache_folder"]
    assert found.answer == "no" and "is a URL" in found.evidence and found.remedy == "name a folder on a local disk"


def test_no_line_record_or_json_has_a_secret(faults, tmp_path, monkeypatch, capsys):
    faults.make("x.bin", MIB)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "A-TOKEN")
    url = f"{faults.url('x.bin', 'http')}?X-Amz-Signature=SIGNED"
    for asked in ("s3://bucket/x.bin", url):
        assert program.main([asked, "--json", "--record", str(tmp_path / asked[:2])]) == 0
        said = capsys.readouterr().out
        assert json.loads(said)["works"] and "?" not in json.loads(said)["path"]
        recorded = "".join(path.read_text() for path in (tmp_path / asked[:2]).rglob("*") if path.is_file())
        for secret in (faults.secret_key, "A-TOKEN", "SIGNED"):
            assert secret not in said + recorded
    host = RecordedHost(tmp_path / "s3")
    again = {one.name: one for one in doctor.diagnose(host, Place("s3://bucket/x.bin"))}
    assert again["one_range"].answer == "yes" and again["throughput"].answer == "yes"


def test_the_program_prints_groups_and_ends_with_the_answer(faults, capsys):
    faults.make("x.bin", MIB)
    assert program.main(["s3://bucket/x.bin"]) == 0
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line in doctor.URL_CHECKS] == list(doctor.URL_CHECKS)
    assert "gpudirect" not in said and said.splitlines()[-1].startswith("works: 's3://bucket/x.bin'")
    assert program.main(["s3://bucket/none.bin"]) == 1
    for wrong in (["s3://bucket/x.bin", "--test"], ["s3://bucket/x.bin", "--require", "gds"], ["s3://!/x"]):
        with pytest.raises(SystemExit) as ended:
            program.main(wrong)
        assert ended.value.code == 2


def test_a_bucket_in_another_region_is_named():
    said = {"region": "eu-west-1", "named": "us-east-1", "host": "x"}
    evidence = _Evidence({"one_range": {"region": "eu-west-1"}, "region": said})
    found = url_checks.region(evidence, Place("s3://bucket/x"))
    assert found.answer == "no" and "AWS_REGION=eu-west-1" in found.remedy


def test_a_server_that_is_not_known_is_asked_for_once(monkeypatch):
    asked = []

    def refuse(self):
        asked.append(self.bucket)
        raise IoError(5, "s3://bucket: no region was found. Check DNS.", "s3://bucket")

    monkeypatch.setattr(S3Store, "_asked_region", refuse)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRET")
    found = answers("s3://bucket/x.bin")
    assert asked == ["bucket"] and found["dns"].answer == found["one_range"].answer == "no"
    assert "no region was found" in found["dns"].evidence and found["dns"].remedy == "Check DNS."
    assert {found[name].answer for name in ("proxy", "tls", "region", "clock")} == {"unknown"}
