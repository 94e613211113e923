"""A server that is far: how much of the network a large read and a training loop use.

    python benchmarks/far_network.py [--delay-ms 50] [--mbit-per-s 200] [--connections 8]

starts the fault server of the tests, whose connections have a delay and a byte rate, and prints:

- the throughput of one read of all of an object, as a share of connections * rate;
- the share of its time that a training loop waits for batches (`GDSDataset` over the URL, with
  `shuffle="auto"`), once the ring is full.
"""

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

import gdsdata
from gdsdata.formats import Records
from gdsdata.io import engine
from gdsdata.storage import stores
from gdsdata.storage.secret import Keys

SERVER = Path(__file__).resolve().parents[1] / "tests" / "servers" / "faults.py"
RECORD_BYTES = 16384
STEP_S = 0.05
MIB = 2**20


class Link(NamedTuple):
    """A network: the delay of each request, and the rate of each connection."""

    delay_ms: float = 50.0
    mbit_per_s: float = 200.0
    connections: int = 8

    @property
    def bytes_per_s(self) -> float:
        return self.connections * self.mbit_per_s * 1e6 / 8


class Trained(NamedTuple):
    """Waits of a training loop: of its first batch, and of those behind the ring's, as a share."""

    first_s: float
    waited: float


@contextlib.contextmanager
def far_server(link: Link) -> Iterator[str]:
    """Start the server, and have this process reach it; yields the URL of a prefix."""
    command = [sys.executable, str(SERVER), "--delay-ms", str(link.delay_ms), "--mbit-per-s", str(link.mbit_per_s)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        keys = Keys(access_key_id="gdsdata", secret_access_key="a-secret-of-tests")
        stores.configure("s3", endpoint_url=server.stdout.readline().strip(), region="us-east-1", credentials=keys)
        engine.configure_http(connections=link.connections)
        yield "s3://bucket/made"
    finally:
        engine.configure_http()
        server.terminate()
        server.wait()
        server.stdout.close()


def read_share(prefix: str, link: Link, size: int) -> float:
    """Read an object at once; returns the throughput as a share of the network's."""
    url = f"{prefix}/{size}/read.bin"
    gdsdata.read_tensor(url, torch.uint8, [MIB])  # threads, credentials and a connection are made
    started = time.perf_counter()
    gdsdata.read_tensor(url, torch.uint8, [size])
    return size / (time.perf_counter() - started) / link.bytes_per_s


def train(prefix: str, link: Link, steps: int, load: float) -> Trained:
    """Train on records of an object.

    Args:
        prefix: of the object's URL.
        link: the network.
        steps: of 50 ms each.
        load: the bytes that the loop needs, as a share of the network's.
    """
    batch_size = int(link.bytes_per_s * load * STEP_S / RECORD_BYTES)
    size = (steps + 20) * batch_size * RECORD_BYTES
    format = Records("u1", (RECORD_BYTES,))
    data = gdsdata.GDSDataset(f"{prefix}/{size}/train.bin", batch_size, format, shuffle="auto", device="cpu")
    waits = []
    batches = iter(data)
    for _ in range(steps):
        started = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - started)
        assert batch.shape[0] == batch_size
        time.sleep(STEP_S)
    full = steps // 4  # the ring has filled by then
    waited = float(np.sum(waits[full:]))
    return Trained(waits[0], waited / (waited + STEP_S * (steps - full)))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--delay-ms", type=float, default=50.0)
    parser.add_argument("--mbit-per-s", type=float, default=200.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--mib", type=int, default=1024, help="of the large read")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--load", type=float, default=0.5, help="the training's share of the network")
    given = parser.parse_args()
    torch.set_num_threads(1)
    link = Link(given.delay_ms, given.mbit_per_s, given.connections)
    with far_server(link) as prefix:
        cpu = time.process_time()
        share = read_share(prefix, link, given.mib * MIB)
        cpu = (time.process_time() - cpu) / (given.mib * MIB / 1e9)
        print(f"read:  {share:.3f} of {link.bytes_per_s / 1e6:.0f} MB/s, {cpu:.3f} cpu-s/GB", flush=True)
        trained = train(prefix, link, given.steps, given.load)
        print(f"train: waits {trained.waited:.2%} of the time; the first batch after {trained.first_s:.3f} s")


if __name__ == "__main__":
    main()
