"""The local cache for people: what it holds, verified, fetched and emptied."""

import contextlib
import gzip
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import MIB, REPOSITORY, random_bytes
from servers.faults import BUCKET, FaultServer

from gdsdata import cache as program
from gdsdata import drawn_bars, progress_bars
from gdsdata.errors import CorruptData, IoError
from gdsdata.formats.listing import listing_of
from gdsdata.io import engine
from gdsdata.io.remote_access import BLOCK_BYTES
from gdsdata.storage import prefetch, transport
from gdsdata.storage.cache import Cache, is_cache
from gdsdata.storage.settings import RemoteSettings, cache_folder
from gdsdata.storage.stores import configure, store_of

SIZE = 2 * BLOCK_BYTES + 1000
URL = "s3://bucket/train/shard.tar"


def keep(cache, content, url=URL, tag='"abc"'):
    """Return the cached object, filled with ``content``."""
    cached = cache.blocks.object(url, engine.object_version(tag), len(content), tag)
    for block in range(cached.block_count):
        assert cached.claim(block) == "claimed"
        assert cached.fill(block, content[block * BLOCK_BYTES :][:BLOCK_BYTES])
    return cached


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "cache")


@pytest.fixture
def content():
    return random_bytes(SIZE, 1)


def test_the_environment_names_the_folder(monkeypatch):
    monkeypatch.delenv("GDSDATA_CACHE", raising=False)
    assert cache_folder() is None
    monkeypatch.setenv("GDSDATA_CACHE", "/nvme/cache")
    assert cache_folder() == "/nvme/cache"
    assert cache_folder("/other") == "/other"


def test_the_environments_folder_may_be_a_file_url_or_relative_as_that_of_cache(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    Cache(tmp_path / "c", "1GiB")
    for said in (f"file://{tmp_path}/c", "c"):
        monkeypatch.setenv("GDSDATA_CACHE", said)
        assert RemoteSettings.of([URL], None, None, None).cache == f"{tmp_path}/c"
        assert program.main([]) == 0
    monkeypatch.setenv("GDSDATA_CACHE", "s3://bucket/c")
    with pytest.raises(ValueError, match="GDSDATA_CACHE='s3://bucket/c' is a URL: give a local folder"):
        RemoteSettings.of([URL], None, None, None)


def test_a_kept_block_is_listed_and_is_a_range_of_a_file(folder, content):
    cache = Cache(folder, "1GiB")
    cached = keep(cache, content)
    assert cached.holds(0, SIZE) and not cached.holds(0, SIZE + 1)
    with open(cached.data_path, "rb") as file:
        assert file.read() == content
    (one,) = cache.objects()
    assert (one.url, one.tag, one.size_bytes, one.held_bytes, one.is_in_use) == (URL, '"abc"', SIZE, SIZE, True)
    assert cache.statistics()["filled_bytes"] == SIZE
    del cached
    assert not cache.objects()[0].is_in_use


def test_a_block_of_another_size_is_not_kept(folder, content):
    cached = Cache(folder, "1GiB").blocks.object(URL, 1, SIZE, "")
    assert cached.claim(0) == "claimed"
    assert cached.claim(0) == "elsewhere"
    assert not cached.fill(0, content[:10])
    assert not cached.holds(0, 1)
    assert cached.claim(0) == "claimed"
    cached.release(0)


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for name in ("file", "file/below"):
        with pytest.raises(IoError, match=rf"^cache='.*{name}' cannot be used, because '.*/file' is a file: give the"):
            Cache(tmp_path / name, "1GiB")
    (tmp_path / "cache.state").write_bytes(b"x" * 4096)
    with pytest.raises(ValueError, match="choose another"):
        Cache(tmp_path, "1GiB")


def test_a_url_is_no_cache_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = r"cache='s3://bucket/c' is a URL: give a local folder"
    with pytest.raises(ValueError, match=words):
        Cache("s3://bucket/c", "1GiB")
    with pytest.raises(ValueError, match=words):
        RemoteSettings.of([URL], "s3://bucket/c", None, None)
    assert os.listdir(tmp_path) == []
    assert RemoteSettings.of([URL], "file:///a%20b", None, None).cache == "/a b"


# ---------------------------------------------------------------------------------------------------------- the program


def run(*arguments, capsys):
    status = program.main(list(arguments))
    return status, capsys.readouterr().out


def test_the_program_lists_objects_without_their_queries(folder, content, capsys):
    cache = Cache(folder, "1GiB")
    kept = [keep(cache, content), keep(cache, content, "https://host/data.bin?X-Amz-Signature=5ecret", "Mon, 1 Jan")]
    del kept[1]
    status, output = run(folder, capsys=capsys)
    assert status == 0
    assert "2 objects" in output and "of at most 1.074 GB" in output and "blocks of 1024 KiB" in output
    lines = {line.rpartition("  ")[2]: line for line in output.splitlines()[2:]}
    assert " yes " in lines[f'{URL}, "abc"'] and "2.098 MB" in lines[f'{URL}, "abc"']
    assert " no " in lines["https://host/data.bin, Mon, 1 Jan"]
    assert "5ecret" not in output


def test_the_program_drops_a_wrong_block(folder, content, capsys):
    cached = keep(Cache(folder, "1GiB"), content)
    assert run(folder, "--verify", capsys=capsys)[0] == 0
    with open(cached.data_path, "r+b") as file:
        file.seek(BLOCK_BYTES + 5)
        file.write(bytes([content[BLOCK_BYTES + 5] ^ 1]))
    status, output = run(folder, "--verify", capsys=capsys)
    assert status == 1
    assert f"wrong: 1 blocks of {URL}" in output and "2 blocks are right, 1 were wrong" in output
    assert cached.holds(0, BLOCK_BYTES) and not cached.holds(BLOCK_BYTES, 1)
    assert run(folder, "--verify", capsys=capsys)[0] == 0


def test_the_program_removes_what_is_not_in_use(folder, content, capsys):
    cache = Cache(folder, "1GiB")
    cached = keep(cache, content)
    keep(cache, content, "s3://bucket/other")
    (stranger := os.path.join(folder, "objects", "notes.txt"))
    with open(stranger, "w") as file:
        file.write("mine")
    status, output = run(folder, "--empty", capsys=capsys)
    assert status == 1
    assert f"kept: {URL}" in output and "1 object," in output
    assert cached.holds(0, SIZE)
    del cached
    assert run(folder, "--empty", capsys=capsys)[0] == 0
    assert cache.objects() == [] and cache.statistics()["used_bytes"] == 0
    assert os.path.exists(stranger)


def test_another_process_sees_what_is_in_use(folder, content):
    cached = keep(Cache(folder, "1GiB"), content)
    listing = subprocess.run(
        [sys.executable, "-m", "gdsdata.cache", "--empty"],
        env=os.environ | {"GDSDATA_CACHE": folder}, cwd=REPOSITORY, capture_output=True, text=True,
    )  # fmt: skip
    assert listing.returncode == 1, listing.stderr
    assert f"kept: {URL}" in listing.stdout
    assert cached.holds(0, SIZE)


def test_an_interrupt_ends_the_program_in_words(folder, capsys, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    Cache(folder, "1GiB")
    monkeypatch.setattr(prefetch, "fetch", interrupted)
    assert program.main([folder, "--prefetch", f"file://{folder}"]) == 130
    assert capsys.readouterr().err == ("gdsdata.cache: interrupted; the cache keeps the blocks that are complete\n")


def test_a_bound_without_a_prefetch_is_refused_and_changes_nothing(folder, capsys):
    before = Cache(folder).statistics()["most_bytes"]
    with pytest.raises(SystemExit) as ended:
        program.main([str(folder), "--cache-bytes", "2GiB"])
    assert ended.value.code == 2 and "--cache-bytes is for --prefetch" in capsys.readouterr().err
    assert Cache(folder).statistics()["most_bytes"] == before


def test_the_program_makes_no_cache_of_another_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("GDSDATA_CACHE", raising=False)
    for arguments in ([str(tmp_path)], [str(tmp_path), "--empty"], [], [str(tmp_path), "--prefetch", URL]):
        with pytest.raises(SystemExit) as ended:
            program.main(arguments)
        assert ended.value.code == 2
    assert list(tmp_path.iterdir()) == [] and not is_cache(tmp_path)
    assert "--cache-bytes" in capsys.readouterr().err


def test_control_characters_of_a_key_are_shown_as_such(folder, content, capsys):
    keep(Cache(folder, "1GiB"), content, "s3://bucket/\x1b[31mred\nline")
    assert "s3://bucket/\\x1b[31mred\\nline" in run(folder, capsys=capsys)[1]


# ------------------------------------------------------------------------------------------------------------- fetching


@pytest.fixture
def server():
    with FaultServer() as running:
        configure(
            "s3", endpoint_url=running.endpoint_url, region=running.region,
            credentials={"access_key_id": running.access_key, "secret_access_key": running.secret_key},
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            stack.callback(configure, "s3")
            yield running


def fetch(source, cache):
    """Fetch what a source means, as the program does."""
    return prefetch.fetch(listing_of(source).paths, cache)


def test_an_object_is_fetched_once(folder, content, server, capsys):
    server.put("shards/a.bin", content)
    url = f"s3://{BUCKET}/shards/a.bin"
    status, output = run(folder, "--prefetch", url, "--cache-bytes", "100MiB", capsys=capsys)
    assert status == 0
    assert f"fetched: 2.098 MB of 2.098 MB: {url}" in output
    before = server.counts()["ranges"]
    assert before == 3
    status, output = run(folder, "--prefetch", url, capsys=capsys)  # with the same bound
    assert status == 0 and f"fetched: 0.000 MB of 2.098 MB: {url}" in output
    assert server.counts()["ranges"] == before
    assert run(folder, "--verify", capsys=capsys)[0] == 0


KEYS = ["a0.bin", "a1.bin", ".a3.bin", "sub/a2.bin", "run[1]/a.bin", "b?1.bin", "folder/"]


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("*.bin", {"a0.bin", "a1.bin", "b?1.bin"}),
        ("**/*.bin", {"a0.bin", "a1.bin", "b?1.bin", "sub/a2.bin", "run[1]/a.bin"}),
        ("a[01].bin", {"a0.bin", "a1.bin"}),
        ("a?.bin", {"a0.bin", "a1.bin"}),
        ("a{0,1}.bin", {"a0.bin", "a1.bin"}),
        ("b?1.bin", {"b?1.bin"}),
        ("", {"a0.bin", "a1.bin", "b?1.bin"}),
        ("sub", {"sub/a2.bin"}),
        ("*.zip", set()),
        ("folder/", set()),
    ],
)
def test_a_url_means_what_it_means_for_a_data_set(folder, server, capsys, source, meant):
    for key in KEYS:
        server.put(f"train/{key}", random_bytes(1000, 2) if key[-1] != "/" else b"")
    url = f"s3://{BUCKET}/train/"
    status = program.main([folder, "--prefetch", url + source, "--cache-bytes", "100MiB"])
    output, errors = capsys.readouterr()
    assert {line.partition(url)[2] for line in output.splitlines() if line.startswith("fetched: ")} == meant
    assert status == (not meant) and ("not fetched: " in errors) == (not meant)
    if meant:
        assert set(listing_of(url + source).paths) == {url + key for key in meant}


def test_a_path_is_no_url_to_fetch(folder, tmp_path, capsys):
    (tmp_path / "a.bin").write_bytes(b"x")
    assert program.main([folder, "--prefetch", str(tmp_path / "a.bin"), "--cache-bytes", "100MiB"]) == 1
    assert "a.bin' is a local file, which no cache keeps" in capsys.readouterr().err


def test_a_fetch_counts_the_bytes_of_each_object_for_its_progress_bar(folder, content, server, monkeypatch):
    begun = []
    monkeypatch.setattr(progress_bars, "_are_seen", lambda: True)
    monkeypatch.setattr(drawn_bars.Drawer, "begin", lambda self, one: begun.append(one))
    monkeypatch.setattr(drawn_bars.Drawer, "end", lambda self, one: None)
    server.put("shards/a.bin", content)
    fetch(f"s3://{BUCKET}/shards/a.bin", Cache(folder, "100MiB"))
    assert [(one.what, one.done, one.total) for one in begun] == [("fetching a.bin", len(content), len(content))]


def test_no_progress_switches_bars_off(folder, content, capsys):
    keep(Cache(folder, "100MiB"), content)
    try:
        assert run(folder, "--no-progress", capsys=capsys)[0] == 0
        assert not progress_bars._is_on
    finally:
        progress_bars.show_progress(True)


def test_a_prefetch_without_room_fails_and_says_how_much_is_missing(folder, server, capsys):
    server.put("large.bin", random_bytes(4 * BLOCK_BYTES, 3))
    url = f"s3://{BUCKET}/large.bin"
    status, output = run(folder, "--prefetch", url, "--cache-bytes", "2.5MiB", capsys=capsys)
    assert status == 1
    assert "no room for 2.097 MB" in output
    assert Cache(folder).statistics()["used_bytes"] <= 2.5 * MIB


def test_a_block_that_a_stopped_process_holds_is_left_out_and_said(folder, content, server, monkeypatch, capsys):
    monkeypatch.setattr(prefetch, "_STALL_TIMEOUT_S", 0.1)
    server.put("a.bin", content)
    url = f"s3://{BUCKET}/a.bin"
    cached = Cache(folder, "100MiB").blocks.object(url, *_version_and_size(url), "")
    assert cached.claim(1) == "claimed"
    status, output = run(folder, "--prefetch", url, "--cache-bytes", "100MiB", capsys=capsys)
    assert status == 1
    assert f"fetched: 1.050 MB of 2.098 MB, 1.049 MB held by another process, which may be stopped: {url}" in output
    assert cached.holds(0, BLOCK_BYTES) and cached.holds(2 * BLOCK_BYTES, 1000)
    cached.release(1)
    assert run(folder, "--prefetch", url, capsys=capsys)[0] == 0


def test_a_block_that_another_process_gives_up_is_fetched(folder, content, server, monkeypatch):
    server.put("a.bin", content)
    url = f"s3://{BUCKET}/a.bin"
    cache = Cache(folder, "100MiB")
    cached = cache.blocks.object(url, *_version_and_size(url), "")
    assert cached.claim(1) == "claimed"
    monkeypatch.setattr(prefetch, "_sleep", lambda _: cached.release(1))
    assert fetch(url, cache) and cached.holds(0, SIZE)


def test_fetched_bytes_are_those_of_the_object(folder, content, server):
    server.put("a.bin", content)
    cache = Cache(folder, "100MiB")
    assert fetch(f"s3://{BUCKET}/a.bin", cache)
    cached = cache.blocks.object(f"s3://{BUCKET}/a.bin", *_version_and_size(f"s3://{BUCKET}/a.bin"), "")
    assert np.array_equal(np.fromfile(cached.data_path, np.uint8), np.frombuffer(content, np.uint8))


def _version_and_size(url):
    store, location = store_of(url)
    info = store.head(location.key)
    return info.version, info.size_bytes


# -------------------------------------------------------------------------------------------------------- wrong answers

WEB_URL = "https://host.example/x.bin"
TAG = {"etag": '"1"'}


class Answers:
    """A web server with one object. ``answer`` is called for a range, with its begin and end."""

    def __init__(self, monkeypatch, content, tag, answer):
        self.content, self.tag, self.answer = content, tag, answer
        self.asked = []  # (URL, headers) of each GET
        monkeypatch.setattr(transport, "_attempt", self.attempt)

    def attempt(self, method, url, headers, body, timeout_s, most_bytes):
        if method == "HEAD":
            return 200, {"content-length": str(len(self.content)), **self.tag}, b""
        self.asked.append((url, dict(headers)))
        begin, last = map(int, re.findall(r"\d+", headers["Range"]))
        status, found, body = self.answer(self.content, begin, last + 1)
        return status, {**self.tag, **found}, body[: most_bytes + 1]


def of_range(content, begin, end, total=None, unit="bytes"):
    return {"content-range": f"{unit} {begin}-{end - 1}/{total or len(content)}"}


def compressed(content, begin, end):
    return 206, of_range(content, begin, end) | {"content-encoding": "gzip"}, gzip.compress(content[begin:end])


def longer(content, begin, end):
    return 206, of_range(content, begin, end), content[begin:end] + b"x"


def longer_without_a_range(content, begin, end):
    return 206, {}, content[begin:end] + b"x"


def another_range(content, begin, end):
    return 206, of_range(content, begin + 1, end + 1), content[begin:end]


def shorter_range(content, begin, end):
    return 206, of_range(content, begin, end - 1), content[begin : end - 1] + b"x"


def no_range(content, begin, end):
    return 206, {"content-range": "bytes */5"}, content[begin:end]


def whole(content, begin, end):
    return 200, {}, content


def larger(content, begin, end):
    return 206, of_range(content, begin, end, len(content) + 5), content[begin:end]


def without_a_range(content, begin, end):
    return 206, {}, content[begin:end]


def another_case(content, begin, end):
    return 206, of_range(content, begin, end, unit="Bytes"), content[begin:end]


def no_total(content, begin, end):
    return 206, of_range(content, begin, end, "*"), content[begin:end]


def no_tag(content, begin, end):
    return 206, of_range(content, begin, end) | {"etag": ""}, content[begin:end]


def gone(content, begin, end):
    return 416, {"content-range": "bytes */5"}, b""


def other_tag(content, begin, end):
    return 206, of_range(content, begin, end) | {"etag": '"2"'}, content[begin:end]


@pytest.mark.parametrize(
    ("answer", "tag", "kind", "said"),
    [
        (compressed, TAG, IoError, "bytes instead of"),
        (longer, TAG, IoError, "more than"),
        (longer_without_a_range, TAG, IoError, "more than"),
        (another_range, TAG, IoError, "the bytes 1 to "),
        (shorter_range, TAG, IoError, "the bytes 0 to "),
        (no_range, TAG, IoError, 'the range "bytes \\*/5"'),
        (whole, TAG, IoError, "does not serve ranges"),
        (larger, TAG, CorruptData, f"replaced meanwhile \\({SIZE} bytes then, {SIZE + 5} now\\)"),
        (gone, TAG, CorruptData, "replaced meanwhile"),
        (other_tag, TAG, CorruptData, 'replaced meanwhile \\(its tag is "2" now\\)'),
    ],
)
def test_a_wrong_answer_is_an_error_and_is_not_kept(folder, content, monkeypatch, answer, tag, kind, said):
    content = bytes(SIZE) if answer is compressed else content
    Answers(monkeypatch, content, tag, answer)
    cache = Cache(folder, "100MiB")
    with pytest.raises(kind, match=f"{WEB_URL}, offset \\d+, length \\d+: .*{said}"):
        fetch(WEB_URL, cache)
    assert cache.statistics()["filled_bytes"] == 0


@pytest.mark.parametrize("answer", [without_a_range, another_case, no_total, no_tag])
def test_an_answer_that_a_data_set_takes_is_kept(folder, content, monkeypatch, answer):
    Answers(monkeypatch, content, TAG, answer)
    cache = Cache(folder, "100MiB")
    assert fetch(WEB_URL, cache)
    assert kept_content(cache, WEB_URL) == content


def kept_content(cache, url):
    """Return what a cache has of an object of `SIZE` whose tag is `TAG`."""
    cached = cache.blocks.object(url, engine.object_version(TAG["etag"]), SIZE, TAG["etag"])
    assert cached.holds(0, SIZE)
    with open(cached.data_path, "rb") as file:
        return file.read()


def test_a_redirect_is_followed_and_gets_no_secret_on_another_host(folder, content, monkeypatch):
    def moved(content, begin, end):
        if (url := server.asked[-1][0]) == f"{WEB_URL}?a=1":
            return 302, {"location": "/x.bin"}, b""
        if url == WEB_URL:
            return 307, {"location": "https://other.example/real.bin"}, b""
        return without_a_range(content, begin, end)

    configure("https", headers={"x-key": "5ecret"})
    monkeypatch.setattr(prefetch, "_REQUESTS", 1)
    server, cache = Answers(monkeypatch, content, TAG, moved), Cache(folder, "100MiB")
    try:
        assert fetch(f"{WEB_URL}?a=1", cache)
    finally:
        configure("https")
    assert kept_content(cache, f"{WEB_URL}?a=1") == content
    assert [(url[8:], headers.get("x-key")) for url, headers in server.asked[:3]] == [
        ("host.example/x.bin?a=1", "5ecret"),
        ("host.example/x.bin", "5ecret"),
        ("other.example/real.bin", None),
    ]


def test_a_redirect_from_https_to_http_is_refused(folder, content, monkeypatch):
    Answers(monkeypatch, content, TAG, lambda *_: (302, {"location": "http://host.example/x.bin"}, b""))
    with pytest.raises(IoError, match="302"):
        fetch(WEB_URL, Cache(folder, "100MiB"))
