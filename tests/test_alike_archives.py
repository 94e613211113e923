"""Archives of tensors that torch.save makes alike: each is found as if it were parsed by itself."""

import io
import secrets

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gdsdata.checkpoint.open_file import OpenFile
from gdsdata.checkpoint.torch_zip import alike_archives
from gdsdata.checkpoint.torch_zip.alike_archives import AlikeArchives
from gdsdata.checkpoint.torch_zip.archive_reader import open_tensor
from gdsdata.checkpoint.torch_zip.file_slice import FileSlice
from gdsdata.checkpoint.torch_zip.unpickling import NotPlain
from gdsdata.errors import CorruptData

SIZES = (0, 1, 7, 2000)
DTYPES = (torch.float32, torch.int32, torch.bfloat16, torch.uint8)


def archive_of(tensor, checksums=True):
    out = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(checksums)
    try:
        torch.save(tensor, out)
    finally:
        torch.serialization.set_crc32_options(before)
    return out.getvalue()


def made(size, dtype, fill, view, checksums):
    tensor = torch.full((2 * size,), fill, dtype=dtype)
    return archive_of({"all": tensor, "half": tensor[size:], "steps": tensor[::2]}[view], checksums)


ARCHIVES = st.builds(
    made,
    st.sampled_from(SIZES),
    st.sampled_from(DTYPES),
    st.integers(0, 100),
    st.sampled_from(["all", "half", "steps"]),
    st.booleans(),
)


def slices_of(folder, archives):
    """Return the archives as parts of one new file."""
    path = folder / f"{secrets.token_hex(8)}.distcp"
    path.write_bytes(b"".join(archives))
    file, at, found = OpenFile(str(path)), 0, []
    for archive in archives:
        found.append(FileSlice(file, at, len(archive)))
        at += len(archive)
    return found


def outcome(open_one, archive):
    try:
        return open_one(archive)
    except (CorruptData, NotPlain) as error:
        return type(error), str(error)


@given(archives=st.lists(ARCHIVES, min_size=1, max_size=12))
def test_any_archives_are_opened_as_each_by_itself(archives, tmp_path_factory):
    found = slices_of(tmp_path_factory.getbasetemp(), archives)
    alike = AlikeArchives()
    assert [alike.open(archive) for archive in found] == [open_tensor(archive) for archive in found]


@given(
    kind=st.tuples(st.sampled_from(SIZES), st.sampled_from(DTYPES), st.sampled_from(["all", "half", "steps"])),
    changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=3),
)
def test_a_damaged_archive_gets_the_error_that_it_has_by_itself(kind, changes, tmp_path_factory):
    """Or none, if what is damaged is not looked at in either way."""
    size, dtype, view = kind
    damaged = bytearray(made(size, dtype, 2, view, True))
    for where, bits in changes:
        damaged[int(where * len(damaged))] ^= bits
    found = slices_of(tmp_path_factory.getbasetemp(), [made(size, dtype, 1, view, True), bytes(damaged)])
    alike = AlikeArchives()
    alike.open(found[0])
    assert outcome(alike.open, found[1]) == outcome(open_tensor, found[1])


def test_every_byte_of_a_directory_counts(tmp_path):
    """Each is changed in turn: chance alone would seldom hit the fields that matter."""
    first, second = made(7, torch.float32, 1, "all", True), made(7, torch.float32, 2, "all", True)
    variants = []
    for at in range(len(second)):
        changed = bytearray(second)
        changed[at] ^= 0x21
        variants.append(bytes(changed))
    found = slices_of(tmp_path, [first, *variants])
    alike = AlikeArchives()
    alike.open(found[0])
    results = [(outcome(alike.open, archive), outcome(open_tensor, archive)) for archive in found[1:]]
    assert [one for one in results if one[0] != one[1]] == []
    assert len({str(alone) for _, alone in results}) > 100


def test_archives_of_one_kind_are_parsed_once(tmp_path, monkeypatch):
    kinds = [
        (2000, torch.float32, "all"),
        (2000, torch.int32, "all"),
        (2000, torch.float32, "half"),
        (7, torch.uint8, "all"),
    ]
    found = slices_of(
        tmp_path, [made(size, dtype, fill, view, True) for fill in range(20) for size, dtype, view in kinds]
    )
    parsed = []
    monkeypatch.setattr(alike_archives, "open_tensor", lambda archive: parsed.append(archive) or open_tensor(archive))
    alike = AlikeArchives()
    for archive in found:
        alike.open(archive)
    assert len(parsed) == len(kinds)


def test_few_kinds_of_one_size_are_kept(tmp_path):
    """A checkpoint of odd archives must not be compared with all that came before."""
    archives = [archive_of(torch.zeros(2000)[index:]) for index in range(alike_archives._MOST_KINDS + 3)]
    found = slices_of(tmp_path, archives)
    alike = AlikeArchives()
    assert [alike.open(archive) for archive in found] == [open_tensor(archive) for archive in found]
    assert max(map(len, alike._kinds.values())) <= alike_archives._MOST_KINDS


def test_an_archive_of_no_plain_tensor_is_refused_each_time(tmp_path):
    found = slices_of(tmp_path, [archive_of({"a": torch.zeros(3)})] * 2)
    alike = AlikeArchives()
    for archive in found:
        with pytest.raises(NotPlain, match="no plain tensor"):
            alike.open(archive)
