"""Bare token files that are read with the wrong dtype: a warning if it is certain, else none."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gdsdata.data.batches import source
from gdsdata.formats import Npy, Tokens, tokens
from gdsdata.formats.tokens import seeming_dtype

many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def text(vocabulary: int, count: int, seed: int = 0) -> np.ndarray:
    """Make tokens as frequent as in text: few of them are frequent."""
    chance = np.random.default_rng(seed)
    return (vocabulary * chance.random(count) ** 3).astype(np.int64)


@pytest.mark.parametrize(
    ("written", "read", "vocabulary", "seems"),
    [
        ("<u2", "int64", 50_257, "uint16"),
        ("<u2", "uint64", 50_257, "uint16"),
        ("<u2", "int32", 50_257, "uint16"),
        ("<u2", "uint32", 32_000, "uint16"),
        ("<u4", "int64", 128_256, "uint32"),
        ("<i4", "uint16", 50_257, "uint32"),
        ("<u4", None, 128_256, "uint32"),
        ("<i8", None, 50_257, "int64"),
        ("<i8", "int32", 128_256, "int64"),
        (">u4", "uint32", 128_256, ">u4"),
        (">i8", "int64", 50_257, ">i8"),
    ],
)
def test_another_dtype_is_a_warning_with_the_one_that_the_file_seems_to_have(
    tmp_path, written, read, vocabulary, seems
):
    path = tmp_path / "x.bin"
    path.write_bytes(text(vocabulary, 4096).astype(written).tobytes())
    said = rf'{path} is read as tokens of .* seem to be of {seems}.*Tokens\("{seems}"\)'
    with pytest.warns(RuntimeWarning, match=said):
        Tokens(read, seq_len=8).index([str(path)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Tokens(seems, seq_len=8).index([str(path)])


def test_some_of_many_files_are_looked_at(tmp_path, monkeypatch):
    looked: list[bytes] = []
    monkeypatch.setattr(tokens, "seeming_dtype", lambda head, dtype: looked.append(head))
    paths = [tmp_path / f"{number:04}.bin" for number in range(1000)]
    for number, path in enumerate(paths):
        path.write_bytes(np.full(200, number, np.uint16).tobytes())
    Tokens("uint16", seq_len=8).index(list(map(str, paths)))
    assert 100 <= len(looked) <= 200
    first, last = (int.from_bytes(head[:2], "little") for head in (looked[0], looked[-1]))
    assert first == 0 and last >= 980, "the files are not spread over the whole data set"


@given(
    st.sampled_from(["uint8", "uint16", "int16", "int32", "uint32", "int64", "uint64"]),
    st.integers(2, 2**20),
    st.integers(1, 600),
    st.integers(0, 2**32),
    st.floats(0, 0.45),
)
@example("uint16", 2, 64, 0, 0.02)  # one mark, in the place of a lower half
@many
def test_tokens_of_any_vocabulary_cause_no_alarm(dtype, vocabulary, count, seed, other_part):
    """This holds for any number of tokens, and with -100 or the largest integer as a mark."""
    tokens = text(min(vocabulary, np.iinfo(dtype).max), count, seed).astype(dtype)
    mark = np.iinfo(dtype).max if seed % 2 or dtype[0] == "u" else -100
    tokens[: int(other_part * count)] = mark
    head = tokens.tobytes()[:1024]
    assert seeming_dtype(head, np.dtype(dtype).newbyteorder("<")) is None


def test_bytes_of_any_file_are_tokens_of_uint8():
    for seed in range(20):
        assert seeming_dtype(np.random.default_rng(seed).bytes(1024), np.dtype("u1")) is None


def test_zeros_and_few_tokens_show_no_dtype():
    for dtype in ("<u2", "<i4", "<i8"):
        assert seeming_dtype(bytes(1024), np.dtype(dtype)) is None
        assert seeming_dtype(b"\xff" * 100, np.dtype(dtype)) is None


@pytest.mark.parametrize("dtype", [None, "<u2", "<i4", ">u2", "uint8", torch.int64])
@pytest.mark.parametrize("raw", [False, True])
def test_files_without_a_header_have_the_samples_that_their_format_expects(tmp_path, dtype, raw):
    (tmp_path / "tokens.bin").write_bytes(bytes(1024))
    format = Tokens(dtype, seq_len=16, raw=raw)
    assert format.index([str(tmp_path / "tokens.bin")]).sample == format.expected_sample


def test_a_gpu_loads_the_cast_that_a_format_expects(monkeypatch):
    asked = []
    monkeypatch.setattr(source, "_load_cast", lambda *cast: asked.append(cast))
    gpu = torch.device("cuda", 0)
    for format, device in [(Tokens("int32"), gpu), (Tokens(), gpu), (Tokens(), torch.device("cpu")), (Npy(), gpu)]:
        source.load_expected_cast(format, device)
    assert asked == [(torch.int32, torch.int64, gpu), (torch.uint16, torch.int64, gpu)]
