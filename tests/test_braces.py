"""Braces in sources mean what they mean to bash."""

import shutil
import subprocess

import pytest
from helpers import few_bytes_of_python
from hypothesis import given, settings
from hypothesis import strategies as st

import gdsdata
from gdsdata.formats.braces import _names_of, expanded
from gdsdata.formats.listing import listing_of

numbers = st.one_of(st.integers(-12, 12).map(str), st.integers(0, 12).map("{:03}".format))
ranges = st.tuples(numbers, numbers, st.sampled_from(["", "..1", "..7", "..-3"])).map(
    lambda it: f"{{{it[0]}..{it[1]}{it[2]}}}"
)
letters = st.tuples(st.sampled_from("adz"), st.sampled_from("acx")).map(lambda it: f"{{{it[0]}..{it[1]}}}")
words = st.sampled_from(["", "a", "b-", ".tar", "x/", "{z}", "{}"])
parts = st.recursive(
    ranges | letters | words,
    lambda inner: st.lists(st.lists(inner, max_size=2).map("".join), min_size=2, max_size=3).map(
        lambda choices: "{" + ",".join(choices) + "}"
    ),
    max_leaves=4,
)
source = st.lists(parts, min_size=1, max_size=2).map(lambda it: f"n{''.join(it)}")
sources = st.lists(source.filter(lambda it: _names_of(it).number <= 10_000), min_size=9, max_size=9)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@given(sources)
@settings(max_examples=8, deadline=None)
def test_names_are_those_that_bash_makes(sources):
    program = "\n".join(f"printf '%s\\n' {source}; echo" for source in sources)
    said = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True).stdout
    for source, names in zip(sources, said.split("\n\n"), strict=False):
        assert set(expanded(source)) == set(names.split("\n")), source


def test_a_source_with_braces_means_all_of_its_files(tmp_path):
    for name in ("t-0008", "t-0009", "t-0010", "t-0011", "v-0008"):
        (tmp_path / name).write_bytes(bytes(8))
    found = [path[-6:] for path in listing_of(f"{tmp_path}/t-{{0009..0011}}").paths]
    assert found == ["t-0009", "t-0010", "t-0011"]
    assert len(listing_of(f"{tmp_path}/{{t,v}}-*8").paths) == 2
    data = gdsdata.GDSDataset(f"{tmp_path}/{{t,v}}-0008", 2, gdsdata.formats.Records("u1", (8,)), device="cpu")
    assert len(data) == 1
    with pytest.raises(FileNotFoundError, match="t-0012 is no file"):
        listing_of(f"{tmp_path}/t-{{0011..0012}}")


def test_files_and_folders_whose_names_have_braces_are_meant(tmp_path):
    folder = tmp_path / "{a,b}"
    folder.mkdir()
    (folder / "{1..2}").touch()
    for source in (folder, folder / "{1..2}", folder / "*", f"file://{folder}/{{1..2}}"):
        assert listing_of(source).paths == [str(folder / "{1..2}")]


def test_braces_behind_a_folder_that_has_some_are_expanded(tmp_path):
    folder = tmp_path / "run{1,2}"
    folder.mkdir()
    for number in range(2):
        (folder / f"t-{number}.bin").touch()
    found = [str(folder / "t-0.bin"), str(folder / "t-1.bin")]
    assert listing_of(folder / "t-{0..1}.bin").paths == found
    assert listing_of(f"file://{folder}/t-{{0..1}}.bin").paths == found


def test_braces_that_mean_too_many_names_are_refused():
    with pytest.raises(ValueError, match="means more than 1000000 names"):
        expanded("a-{0..9999999999}.tar")
    with pytest.raises(ValueError, match="means more than 1000000 names"):
        expanded("{0..999}{0..999}{0..9}")  # some of them twice


@pytest.mark.parametrize(
    "source, said",
    [
        ("a-{0..1000000000}{0..1000000000}.tar", "means more than 1000000 names"),
        ("{a,b}" * 90, "means more than 1000000 names"),
        ("{a,{0..99999}}" * 4, "means more than 1000000 names"),
        (f"{{0..{'9' * 5000}}}", "a number of 5000 digits"),
        (f"{{{'0' * 5000}1..2}}", "a number of 5001 digits"),
        ("{a,b}" * 5000, "5000 times an opening brace"),
        ("{" * 5000, "5000 times an opening brace"),
        ("{a," * 5000 + "}" * 5000, "5000 times an opening brace"),
        ("x" * 10_000 + "{0..99999}", "names of 1000500000 characters in all"),
    ],
)
def test_braces_that_would_take_memory_or_time_are_refused_with_the_bound(source, said):
    with few_bytes_of_python(2**20), pytest.raises(ValueError, match=said):
        expanded(source)


def test_braces_one_behind_the_other_are_no_deep_calls():
    assert expanded("{a}" * 90) == ["{a}" * 90]
    assert expanded("{" * 90) == ["{" * 90]
    assert expanded("{1..1}" * 90) == ["1" * 90]


def test_urls_have_braces_too():
    assert expanded("s3://b/t-{0..1}.tar") == ["s3://b/t-0.tar", "s3://b/t-1.tar"]
