"""The servers of tests/servers/ start, keep what they are given, and end with their process.

From start to the first object (2 cores, 2026-11-26): SeaweedFS 1.1 s, Azurite 1.1 s, rclone and the
GCS stand-in 0.1 s. So each worker of pytest-xdist has servers of its own.
"""

import contextlib
import os
import subprocess
import sys
import urllib.request

import pytest
from helpers import MIB, REPOSITORY, random_bytes

from gdsdata.bench.harness.server import ServerFailed, ServerProcess, free_ports

NAMES = ["seaweedfs", "rclone", "azurite", "gcs"]


@pytest.fixture(params=NAMES)
def server(request):
    return request.getfixturevalue(request.param)


def test_a_server_keeps_what_it_is_given(server):
    content = random_bytes(5 * MIB + 3)
    names, uploads = server.names(), server.uploads()  # of other tests
    assert server.put("a folder/ä.bin", content) == f"{server.scheme}://{server.bucket}/a folder/ä.bin"
    assert server.get("a folder/ä.bin") == content
    server.put("other.bin", b"")
    assert server.names("a folder/") == ["a folder/ä.bin"]
    server.delete("a folder/ä.bin")
    server.delete("other.bin")
    assert (server.names(), server.uploads()) == (names, uploads)


def test_uploads_that_are_not_complete_are_seen(seaweedfs):
    before = seaweedfs.uploads()
    upload = seaweedfs.client.create_multipart_upload(Bucket=seaweedfs.bucket, Key="half.bin")["UploadId"]
    assert sorted(seaweedfs.uploads()) == sorted([*before, "half.bin"])
    seaweedfs.client.abort_multipart_upload(Bucket=seaweedfs.bucket, Key="half.bin", UploadId=upload)
    assert seaweedfs.uploads() == before


def test_rclone_answers_a_range_with_200(rclone):
    rclone.put("whole.bin", bytes(1000))
    request = rclone.client.generate_presigned_url("get_object", {"Bucket": rclone.bucket, "Key": "whole.bin"})
    with urllib.request.urlopen(urllib.request.Request(request, headers={"Range": "bytes=10-19"})) as answer:
        assert (answer.status, len(answer.read())) == (200, 10)


def test_a_sas_reads_a_blob_of_azurite(azurite):
    azurite.put("blob.bin", b"0123456789")
    url = f"{azurite.endpoint_url}/{azurite.bucket}/blob.bin?{azurite.sas}"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"x-ms-range": "bytes=2-4"})) as answer:
        assert (answer.status, answer.read()) == (206, b"234")


PROGRAM = """
import importlib, pathlib, sys, time
sys.path.insert(0, "tests")
name, folder = sys.argv[1:]
with importlib.import_module(f"servers.{name}").running(pathlib.Path(folder)) as server:
    print(server.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("name", ["seaweedfs", "rclone", "gcs"])
def test_a_server_ends_with_a_process_that_is_killed(name, tmp_path, request):
    request.getfixturevalue(name)  # or the test is skipped
    command = [sys.executable, "-c", PROGRAM, name, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, cwd=REPOSITORY, env=environment) as starter:
        server = int(starter.stdout.readline())
        with contextlib.closing(os.fdopen(os.pidfd_open(server), "rb")) as ending:
            starter.kill()
            assert ended_within(ending.fileno(), 10)


def ended_within(pidfd, seconds):
    import select

    return bool(select.select([pidfd], [], [], seconds)[0])


def test_a_server_that_cannot_start_says_why(tmp_path):
    command = [sys.executable, "-c", "import sys; sys.exit('no such bucket')"]
    with pytest.raises(ServerFailed, match="ended with 1: no such bucket"):
        ServerProcess(command, *free_ports(1), tmp_path)


def test_a_server_that_does_not_listen_is_killed(tmp_path):
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(ServerFailed, match="nothing listens at"):
        ServerProcess(command, *free_ports(1), tmp_path, within_s=0.5)
