"""A file system that accepts open(O_DIRECT) and then refuses several requests in flight."""

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import BACKENDS, eventually, in_new_process, random_bytes

import gdsdata
from gdsdata import EngineOptions, GDSDataset, Reading
from gdsdata.errors import GdsdataError
from gdsdata.formats import Records

RECORD_BYTES, RECORDS, BATCH = 65536, 128, 32
REQUESTS_TOGETHER = 4


def lack_of_fuse() -> str:
    """Return the reason why FUSE cannot mount a file system here, or ""."""
    if os.geteuid() != 0:
        return "mounting a file system by FUSE needs root"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse to open"
    if shutil.which("pkg-config") is None or subprocess.run(["pkg-config", "--exists", "fuse3"]).returncode != 0:
        return "libfuse3 is missing: install libfuse3-dev and pkg-config (apt-get), or fuse3-devel and pkgconf (dnf)"
    return ""


@pytest.fixture(scope="module")
def refusing_server(tmp_path_factory) -> Path:
    """Build the program that serves such a file system."""
    if lack := lack_of_fuse():
        pytest.skip(lack)
    program = tmp_path_factory.mktemp("refusing") / "refusing_fs"
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], check=True, capture_output=True, text=True)
    source = Path(__file__).parent / "refusing_fs.c"
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-O1", "-o", program, source, *flags.stdout.split()], check=True)
    return program


@pytest.fixture
def refusing(tmp_path, refusing_server) -> Iterator[Path]:
    """Mount an empty folder of such a file system."""
    behind, mount = tmp_path / "behind", tmp_path / "mount"
    behind.mkdir()
    mount.mkdir()
    arguments = [refusing_server, behind, str(REQUESTS_TOGETHER), mount, "-f"]
    server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if not eventually(lambda: os.path.ismount(mount) or server.poll() is not None) or server.poll() is not None:
        server.kill()
        pytest.skip(f"no FUSE mount is possible here: {server.communicate()[1]}")
    yield mount
    subprocess.run(["umount", "--lazy", mount], check=True)
    server.terminate()
    server.communicate(timeout=10)


def options_of(backend: str, **others) -> EngineOptions:
    workers = 1 if backend == "uring" else 8
    return EngineOptions(backend=backend, workers=workers, queue_depth=32, request_bytes=RECORD_BYTES, **others)


def read_while_it_refuses(path: Path, backend: str, strict: bool) -> tuple[np.ndarray, dict, list[str]]:
    options = options_of(backend, strict=strict)
    dataset = GDSDataset(
        path, BATCH, Records("u1", (RECORD_BYTES,)), shuffle=False, device="cpu", reading=Reading(options=options)
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = np.concatenate([batch.numpy().copy() for batch in dataset])
        list(dataset)
    return got, dataset.stats()["bytes"], [str(warning.message) for warning in warned]


@pytest.mark.parametrize("backend", BACKENDS)
def test_reads_in_flight_at_a_refusal_all_go_through_the_page_cache(refusing, backend):
    content = random_bytes(RECORD_BYTES * RECORDS)
    (refusing.parent / "behind" / "a.bin").write_bytes(content)
    got, routes, warned = in_new_process(read_while_it_refuses, refusing / "a.bin", backend, False)
    assert got.tobytes() == content
    assert routes["direct"] == 0
    assert routes["buffered"] >= RECORD_BYTES * BATCH
    assert [message for message in warned if "O_DIRECT was refused" in message and "Invalid argument" in message]


def error_of_a_strict_read(path: Path, backend: str) -> str:
    try:
        read_while_it_refuses(path, backend, True)
    except GdsdataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_refusal_is_an_error_with_its_place_where_fallbacks_are(refusing, backend):
    (refusing.parent / "behind" / "a.bin").write_bytes(random_bytes(RECORD_BYTES * RECORDS))
    error = in_new_process(error_of_a_strict_read, refusing / "a.bin", backend)
    assert "read with O_DIRECT" in error and "a.bin" in error and "Invalid argument" in error


def write_while_it_refuses(path: Path, backend: str, content: bytes, offset: int) -> None:
    with gdsdata.Engine(options_of(backend)) as engine:
        tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        engine.write(path, tensor, offset=offset).result()


@pytest.mark.parametrize("offset", [0, 1000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_in_flight_at_a_refusal_all_go_through_the_page_cache(refusing, backend, offset):
    before, content = random_bytes(5000, seed=1), random_bytes(RECORD_BYTES * RECORDS + 12345)
    behind = refusing.parent / "behind" / "w.bin"
    behind.write_bytes(before)
    in_new_process(write_while_it_refuses, refusing / "w.bin", backend, content, offset)
    assert behind.read_bytes() == before[:offset] + content
