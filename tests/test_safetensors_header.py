"""Headers of safetensors: those that its own library refuses or reads are refused or read here."""

import json
import struct

import pytest
import torch

import gdsdata
from gdsdata.errors import CorruptData
from gdsdata.formats import Safetensors
from gdsdata.formats.parsers import safetensors_header
from gdsdata.formats.parsers.safetensors_header import DTYPES

library = pytest.importorskip("safetensors.torch")

A = b'"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
DATA = bytes(range(64, 72))


def write(path, header: bytes | dict, data: bytes = DATA) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return str(path)


def values_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Make a tensor of any dtype, with bits that differ."""
    count = torch.Size(shape).numel() * dtype.itemsize
    return (torch.arange(count) % 2 if dtype == torch.bool else torch.arange(count)).byte().view(dtype).view(shape)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].view(torch.uint8).equal(tensor.view(torch.uint8))


# The header, and whether the library refuses it too. The format's description refuses the others.
REFUSED = {
    "a name twice": (b"{" + A + b"," + A + b"}", False),
    "a name twice with other bytes": (b"{" + A + b"," + A.replace(b"F32", b"I32") + b"}", False),
    "metadata twice": (b'{"__metadata__":{},"__metadata__":{},' + A + b"}", True),
    "a key of the metadata twice": (b'{"__metadata__":{"k":"a","k":"b"},' + A + b"}", False),
    "a dtype twice": (b'{"a":{"dtype":"I32",' + A.removeprefix(b'"a":{') + b"}", True),
    "offsets twice": (b'{"a":{"data_offsets":[0,8],' + A.removeprefix(b'"a":{') + b"}", True),
    "a blank before the brace": (b" {" + A + b"}", False),
    "a byte order mark": (b"\xef\xbb\xbf{" + A + b"}", True),
    "a list": (b"[{" + A + b"}]", True),
    "UTF-16": (("{" + A.decode() + "}").encode("utf-16-le"), True),
    "no UTF-8": (b'{"\xff' + A[1:] + b"}", True),
    "half a character": (b'{"\\ud800' + A[1:] + b"}", True),
    "half a character in the metadata": (b'{"__metadata__":{"k":"\\udfff"},' + A + b"}", True),
    "metadata of a number": (b'{"__metadata__":{"k":1},' + A + b"}", True),
    "metadata of null": (b'{"__metadata__":{"k":null},' + A + b"}", True),
    "metadata of a dict": (b'{"__metadata__":{"k":{}},' + A + b"}", True),
    "metadata that is a list": (b'{"__metadata__":[],' + A + b"}", True),
    "metadata that is text": (b'{"__metadata__":"k",' + A + b"}", True),
    "a number that is none": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":NaN}}', True),
    "a shape that is a dict": (b'{"a":{"dtype":"F64","shape":{},"data_offsets":[0,8]}}', True),
    "a shape that is text": (b'{"a":{"dtype":"F64","shape":"","data_offsets":[0,8]}}', True),
    "three offsets": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}}', True),
    "no dtype": (b'{"a":{"shape":[2],"data_offsets":[0,8]}}', True),
    "no such dtype": (b'{"a":{"dtype":"f32","shape":[2],"data_offsets":[0,8]}}', True),
    "a dtype that is a list": (b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}', True),
    "zeros behind it": (b"{" + A + b"}\0\0", True),
    "half a byte": (b'{"a":{"dtype":"F4","shape":[15],"data_offsets":[0,8]}}', True),
    "half a byte of six bits": (b'{"a":{"dtype":"F6_E2M3","shape":[9],"data_offsets":[0,8]}}', True),
    "a size of more bytes than there are": (b'{"a":{"dtype":"F6_E2M3","shape":[12],"data_offsets":[0,8]}}', True),
}


@pytest.mark.parametrize(("header", "library_refuses"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_header_is_refused_with_its_path_place_and_remedy(tmp_path, header, library_refuses):
    path = write(tmp_path / "x.safetensors", header)
    if library_refuses:
        with pytest.raises(Exception, match=r"(?i)header|dtype"):
            library.load_file(path)
    for reading in (lambda: Safetensors().index([path]), lambda: gdsdata.load(path)):
        with pytest.raises(CorruptData) as caught:
            reading()
        assert caught.value.path == path and path in str(caught.value)
        assert "rite it again" in str(caught.value) or "etch it again" in str(caught.value)
    with pytest.raises(CorruptData) as caught:
        safetensors_header.parse(header, path, 8 + len(header), 16 + len(header))
    assert (caught.value.offset, caught.value.length) == (8, len(header)) and "offset 8" in str(caught.value)


READ = {
    "blanks behind it": b"{" + A + b"} \n\t ",
    "metadata of text": b'{"__metadata__":{"k":"v","":""},' + A + b"}",
    "metadata of null": b'{"__metadata__":null,' + A + b"}",
    "more of a tensor": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"x":[1,{}]}}',
    "the same key in two tensors": b"{" + A + b',"dtype":{"dtype":"F32","shape":[0],"data_offsets":[8,8]}}',
    "text that is not ASCII": '{"é\\ud83d\\ude00'.encode() + A[1:] + b"}",
}


@pytest.mark.parametrize("header", READ.values(), ids=READ)
def test_a_header_that_the_library_reads_is_read_alike(tmp_path, header):
    path = write(tmp_path / "x.safetensors", header)
    assert_same(gdsdata.load(path), library.load_file(path))


def test_a_missing_file_is_named_with_the_index_that_names_it(tmp_path):
    index = tmp_path / "x.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=f"'{index}' names 'gone.safetensors'.*Fetch that shard") as caught:
        gdsdata.load(index)
    assert caught.value.path == str(tmp_path / "gone.safetensors")


# ---------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [(6,), (3, 4), (2, 3, 2), (2, 0), (0, 4)])
def test_every_dtype_is_written_and_read_as_the_library_does(tmp_path, dtype, shape):
    if dtype not in library._SIZE:
        pytest.skip(f"safetensors of this version does not know {dtype}")
    state = {"x": values_of(dtype, *shape), "y": torch.ones(1, dtype=torch.uint8)}
    library.save_file(state, tmp_path / "theirs.safetensors")
    gdsdata.save(state, tmp_path / "ours.safetensors")
    for path in (tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"):
        assert_same(library.load_file(path), state)
        assert_same(gdsdata.load(path), state)
        assert_same(gdsdata.load(path, only=["x"]), {"x": state["x"]})
        into = {name: torch.zeros(one.nbytes).byte().view(one.dtype).view(one.shape) for name, one in state.items()}
        gdsdata.load(path, into=into)
        assert_same(into, state)
    assert_same(gdsdata.load(tmp_path / "ours.safetensors", verify=True), state)


def test_floats_of_four_bits_are_rows_of_pairs(tmp_path):
    x = values_of(torch.float4_e2m1fn_x2, 8, 3)
    library.save_file({"x": x}, tmp_path / "x.safetensors")
    (header,) = Safetensors("rows", "x").index([str(tmp_path / "x.safetensors")]).paths
    (batch,) = gdsdata.GDSDataset(header, 8, Safetensors("rows", "x"), shuffle=False, device="cpu")
    assert_same({"x": batch}, {"x": x})


def test_a_single_float_of_four_bits_is_refused_at_the_save(tmp_path):
    x = values_of(torch.float4_e2m1fn_x2)
    with pytest.raises(ValueError, match=r"x is a single torch.float4_e2m1fn_x2, .*reshape it to \(1,\)"):
        gdsdata.save({"x": x}, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("dtype", "shape", "size_bytes", "words"),
    [
        ("F6_E2M3", [4], 3, "'a' is of dtype F6_E2M3, which torch does not have"),
        ("F6_E3M2", [2, 2], 3, "'a' is of dtype F6_E3M2, which torch does not have"),
        ("F4", [4, 1], 2, r"'a' is of dtype F4 and shape \[4, 1\], and torch has such in pairs along the last axis"),
    ],
)
def test_a_sound_tensor_that_torch_cannot_hold_is_no_damage(tmp_path, dtype, shape, size_bytes, words):
    about = {"a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size_bytes]}}
    path = write(tmp_path / "x.safetensors", about, bytes(size_bytes))
    with pytest.raises(Exception, match=r"F6_E|last dim"):  # the library cannot save it either
        library.load_file(path)
    for reading in (lambda: Safetensors().index([path]), lambda: gdsdata.load(path)):
        with pytest.raises(ValueError, match=f"{path}.*{words}.*save it") as caught:
            reading()
        assert type(caught.value) is ValueError
