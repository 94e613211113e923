"""URLs as sources: the objects that they mean are the files that the same paths mean."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from object_server import ObjectServer, serving

from gdsdata.formats.listing import listing_of
from gdsdata.formats.remote_listing import files_of_urls
from gdsdata.storage import objects, stores, transport


@pytest.fixture
def server(monkeypatch):
    with serving(monkeypatch) as server:
        yield server


def put(server, *keys):
    for key in keys:
        server.content[key] = b"x"


def test_a_prefix_means_its_own_objects_without_hidden_ones(server):
    put(server, "data/b", "data/a", "data/.h", "data/sub/c", "data2/d", "data/")
    for source in ("data/", "data"):
        assert listing_of(server.url(source)).paths == [server.url("data/a"), server.url("data/b")]
    assert server.lists == 2 and server.heads == 1


def test_a_bucket_is_a_folder(server):
    put(server, "b", "a", "sub/c")
    assert listing_of("s3://bucket").paths == listing_of("s3://bucket/").paths == ["s3://bucket/a", "s3://bucket/b"]


def test_lists_mix_urls_and_paths_in_the_order_of_names(server, tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    put(server, "b", "a", "c")
    found = listing_of([server.url("b"), tmp_path / "f", server.url("[ac]"), f"file://{tmp_path}/f"])
    assert found.paths == [str(tmp_path / "f"), *map(server.url, "abc")]


def test_a_name_with_brackets_is_meant_before_the_glob(server):
    put(server, "a[1]", "a1")
    assert listing_of(server.url("a[1]")).paths == [server.url("a[1]")]


@pytest.mark.parametrize("name", ["run[1]", "run?", "run*", "[ab]"])
def test_a_folder_whose_name_looks_like_a_glob_is_meant_before_the_glob(server, name):
    put(server, f"data/{name}/b", f"data/{name}/sub/c", "data/run1/d", "data/a/e", "data/runs")
    own, deep = [server.url(f"data/{name}/b")], server.url(f"data/{name}/sub/c")
    assert listing_of(server.url(f"data/{name}/")).paths == listing_of(server.url(f"data/{name}")).paths == own
    for source in (f"data/{name}/", f"data/{name}"):
        assert files_of_urls([server.url(source)], is_deep=True)[server.url(source)] == [*own, deep]


def test_a_folder_that_looks_like_a_glob_is_found_below_another_such_folder(server):
    put(server, "a[1]/[x]/b", "a1/x/c")
    assert listing_of(server.url("a[1]/[x]")).paths == [server.url("a[1]/[x]/b")]


def test_objects_in_a_list_are_identified_without_another_request(server):
    put(server, *(f"data/{i:04}" for i in range(1000)))
    paths = listing_of(server.url("data/*")).paths
    objects.identities(paths)
    assert (len(paths), server.lists, server.heads) == (1000, 1, 0)


def test_a_new_list_takes_what_an_object_is_now(server):
    put(server, "data/a")
    before = objects.identities(listing_of(server.url("data/")).paths)
    server.content["data/a"] = b"longer"
    after = objects.identities(listing_of(server.url("data/a")).paths)
    assert before != after and after[0].size_bytes == 6


def test_an_object_that_is_new_since_a_list_of_a_folder_above_is_found(server):
    put(server, "data/a")
    assert listing_of(server.url("**")).paths == [server.url("data/a")]
    put(server, "data/sub/b")
    assert listing_of(server.url("data/sub/b")).paths == [server.url("data/sub/b")]


@pytest.mark.parametrize("source", ["nothing", "nothing/", "no*", "data/*/x", "data/*/"])
def test_a_url_of_no_object_is_an_error_that_says_so(server, source):
    put(server, "data/a")
    with pytest.raises(FileNotFoundError, match="is no object, no prefix with objects and no glob of any"):
        listing_of(server.url(source))


@pytest.mark.parametrize(
    ("name", "is_index"), [("x.txt", True), ("x.txt?sig=1", True), ("x.tar?f=x.txt", False), ("x.tar", False)]
)
def test_the_path_of_a_web_url_says_whether_it_is_an_index_file(monkeypatch, name, is_index):
    def attempt(method, url, *_):
        return 200, {"content-length": "9"}, b"a.tar\n" if method == "GET" else b""

    monkeypatch.setattr(transport, "_attempt", attempt)
    url = f"https://host.example/d/{name}"
    assert files_of_urls([url])[url] == ["https://host.example/d/a.tar" if is_index else url]


NAMES = st.text(st.sampled_from("ab.1"), min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
PARTS = st.one_of(NAMES, st.sampled_from(["*", "**", "a*", "?", "[ab]*", "*.1", ".*", "[!a]", "[", "a?1"]))


@given(
    st.lists(st.lists(NAMES, min_size=1, max_size=3).map(tuple), min_size=1, max_size=12),
    st.lists(PARTS, min_size=1, max_size=4),
)
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_a_glob_means_the_objects_whose_files_it_means(tmp_path_factory, keys, pattern):
    folder = tmp_path_factory.mktemp("files")
    server = _OfList()
    for key in keys:
        path = folder.joinpath(*key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        except OSError:  # a file cannot be a folder too
            continue
        server.content["/".join(key)] = b""
    stores._stores["s3", "of-list"] = server
    try:
        assert _found(f"s3://of-list/{'/'.join(pattern)}", "s3://of-list/") == _found(
            str(folder.joinpath(*pattern)), f"{folder}/"
        )
    finally:
        del stores._stores["s3", "of-list"]


def _found(source, folder):
    try:
        return sorted(path.removeprefix(folder) for path in listing_of(source).paths)
    except FileNotFoundError:
        return []


class _OfList(ObjectServer):
    def __init__(self):
        self.bucket, self.content, self.lists, self.heads = "of-list", {}, 0, 0
        self._tags = {}


@pytest.mark.parametrize("split", [None, "train"])
def test_a_prefix_with_the_log_of_a_table_is_refused(server, split):
    put(server, "t/0.parquet", "t/_delta_log/00000000000000000000.json", "u/0.parquet", "u/_delta_log")
    with pytest.raises(ValueError, match="s3://bucket/t/? is a Delta table: its log, _delta_log, says"):
        listing_of("s3://bucket/t/", split)
    assert "s3://bucket/u/0.parquet" in listing_of("s3://bucket/u/").paths


LOGS = {
    "_delta_log": "t/_delta_log/00000000000000000000.json",
    ".hoodie": "t/.hoodie/hoodie.properties",
    "metadata": "t/metadata/v1.metadata.json",
}


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("glob", ["t/**/*.parquet", "t/*/*.parquet", "**/*", "*/p=1/*"])
def test_a_glob_of_objects_of_a_table_with_a_log_is_refused(server, log, glob):
    put(server, "t/p=1/0.parquet", "t/p=2/0.parquet", LOGS[log], "u/a.npy", "u/metadata/v1.json")
    with pytest.raises(ValueError, match=f"s3://bucket/t/ is a .* table: its log, {log}, says"):
        listing_of(f"s3://bucket/{glob}")
    with pytest.raises(ValueError, match=f"s3://bucket/t/ is a .* table: its log, {log}, says"):
        listing_of("s3://bucket/", "train")
    assert listing_of("s3://bucket/**/*.npy").paths == ["s3://bucket/u/a.npy"]
    assert listing_of("s3://bucket/t/p=1/0.parquet").paths == ["s3://bucket/t/p=1/0.parquet"]
