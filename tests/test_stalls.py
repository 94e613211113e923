"""`StallError` means that nothing moved: slow storage is waited for, hanging storage is not.

The storage here answers one request of 64 KiB at a time. An item takes 16 requests.
"""

import io
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import grouped, random_bytes, require_direct

import gdsdata
from gdsdata import EngineOptions, GDSDataset
from gdsdata.errors import StallError
from gdsdata.formats import Records

ITEM_BYTES = 2**20
STALL_S = 0.8
_ONE_BY_ONE = dict(
    direct="always", backend="posix", workers=1, queue_depth=1, request_bytes=65536, stall_timeout_s=STALL_S
)
# 16 of these take longer than STALL_S, and each takes much less. One of them is not over when
# STALL_S is.
SLOW = EngineOptions(**_ONE_BY_ONE, faults="late=1,late_ms=100")
HANGING = EngineOptions(**_ONE_BY_ONE, faults="late=1,late_ms=5000")
CONTENT = random_bytes(ITEM_BYTES)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def _first_batch(*data, **arguments):
    batches = iter(
        GDSDataset(
            *data,
            shuffle=arguments.pop("shuffle", False),
            device="cpu",
            **grouped({"prefetch": 1, **arguments}),
        )
    )
    try:
        return next(batches)
    finally:
        batches.close()


def uniform(folder: Path) -> Callable:
    (folder / "a.bin").write_bytes(CONTENT)
    return lambda options: _first_batch(folder / "a.bin", 1, Records("uint8", (ITEM_BYTES,)), options=options)[0]


def records_in_a_batch(folder: Path) -> Callable:
    (folder / "a.bin").write_bytes(CONTENT)
    data = folder / "a.bin", 16, Records("uint8", (ITEM_BYTES // 16,))
    return lambda options: _first_batch(*data, options=options).reshape(-1)


def tar(folder: Path) -> Callable:
    write_tar(folder / "a.tar", {"a.bin": CONTENT})
    return lambda options: _first_batch(folder / "a.tar", 1, options=options)["bin"].values


def tar_decoded_ahead(folder: Path) -> Callable:
    pytest.importorskip("torchvision")
    from torchvision.io import write_png

    image = torch.from_numpy(np.frombuffer(random_bytes(3 * 640 * 512), np.uint8).reshape(3, 512, 640).copy())
    write_png(image, str(folder / "0.png"))
    write_tar(folder / "a.tar", {"a.png": (folder / "0.png").read_bytes()})
    (folder / "0.png").unlink()

    def read(options):
        found = _first_batch(folder / "a.tar", 1, decode={"png": "image"}, options=options)["png"][0]
        assert torch.equal(found, image)
        return torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8)

    return read


def row_group(folder: Path) -> Callable:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"x": pa.array(np.frombuffer(CONTENT, np.uint8))})
    parquet.write_table(table, folder / "a.parquet", compression="none", use_dictionary=False)
    return lambda options: _first_batch(folder / "a.parquet", ITEM_BYTES, options=options)["x"].to(torch.uint8)


def pieces(folder: Path) -> Callable:
    (folder / "a.bin").write_bytes(CONTENT)
    shuffle = gdsdata.Lanes(1, 16, 4)
    data = folder / "a.bin", 64, Records("uint8", (ITEM_BYTES // 64,))

    def read(options):
        rows = _first_batch(*data, shuffle=shuffle, options=options)
        stored = torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8).view(64, -1)
        assert sorted(map(bytes, rows.numpy())) == sorted(map(bytes, stored.numpy()))
        return stored.reshape(-1)

    return read


def read_tensor(folder: Path) -> Callable:
    (folder / "a.bin").write_bytes(CONTENT)

    return lambda options: gdsdata.read_tensor(folder / "a.bin", torch.uint8, (ITEM_BYTES,), options=options)


def load(folder: Path) -> Callable:
    torch.save({"x": torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8)}, folder / "a.pt")
    return lambda options: gdsdata.load(folder / "a.pt", options=options)["x"]


def save(folder: Path) -> Callable:
    def write(options):
        gdsdata.save({"x": torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8)}, folder / "a.pt", options=options)
        return torch.load(folder / "a.pt")["x"]

    return write


def write_tensor(folder: Path) -> Callable:
    def write(options):
        content = torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8)
        gdsdata.write_tensor(content, folder / "a.bin", options=options)
        return torch.frombuffer(bytearray((folder / "a.bin").read_bytes()), dtype=torch.uint8)

    return write


WAYS = (
    *(uniform, records_in_a_batch, tar, tar_decoded_ahead, row_group, pieces),
    *(read_tensor, load, save, write_tensor),
)


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def move(request, tmp_path) -> Callable:
    (tmp_path / "probe").write_bytes(bytes(4096))
    require_direct(tmp_path / "probe")
    folder = tmp_path / "data"
    folder.mkdir()
    return request.param(folder)


def test_slow_storage_is_no_stall_however_long_all_of_it_takes(move):
    began = time.monotonic()
    found = move(SLOW)
    assert time.monotonic() - began > 1.5 * STALL_S, "it was not slow"
    assert found.numpy().tobytes() == CONTENT


def test_storage_that_gives_nothing_is_a_stall_within_about_the_timeout(move):
    began = time.monotonic()
    with pytest.raises(StallError, match="stall_timeout_s raises the limit"):
        move(HANGING)
    assert STALL_S <= time.monotonic() - began < STALL_S + 1.5


def test_decoding_that_takes_longer_than_the_timeout_is_no_stall(tmp_path, monkeypatch):
    pytest.importorskip("torchvision")
    from torchvision.io import write_png

    from gdsdata.decoders import Image

    write_png(torch.zeros(3, 8, 8, dtype=torch.uint8), str(tmp_path / "0.png"))
    write_tar(tmp_path / "a.tar", {"a.png": (tmp_path / "0.png").read_bytes()})
    plain = Image.decode
    monkeypatch.setattr(Image, "decode", lambda *arguments: time.sleep(0.3) or plain(*arguments))
    options = replace(EngineOptions(), stall_timeout_s=0.1)
    assert _first_batch(tmp_path / "a.tar", 1, decode={"png": "image"}, options=options)["png"][0].sum() == 0
