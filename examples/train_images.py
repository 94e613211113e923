"""Train a small convolutional network on WebDataset shards of JPEGs.

    python examples/train_images.py               # some seconds on 2 cores; makes its shards
    python examples/train_images.py --device cpu  # the processor's cores decode ahead
    python examples/train_images.py --data imagenet/train --classes 1000 --size 224

A GPU, if there is one, decodes the images. A sample is two members of a tar: KEY.jpg, and KEY.cls
with the class in digits. The last shard is held out for testing. The example draws discs, squares,
crosses and rings, of all sizes and colors. tests/test_examples.py runs it.
"""

import argparse
import io
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import gdsdata

cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gdsdata"
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, help="folder of .tar shards, two at least; made if left out")
parser.add_argument("--image", default="jpg", help="extension of the images in the shards")
parser.add_argument("--label", default="cls", help="extension of the classes")
parser.add_argument("--classes", type=int, default=4, help="classes are numbers from 0 to one less than this")
parser.add_argument("--images", type=int, default=1280, help="images to make, a fifth of them held out")
parser.add_argument("--size", type=int, default=48, help="pixels along an edge, to which all images are resized")
parser.add_argument("--batch-size", type=int, default=64, help="images in a step")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

# ---------------------------------------------------------------------------------------------------------------- data


def drawn(rng: np.random.Generator) -> tuple[torch.Tensor, int]:
    """Draw an image, uint8 (3, height, width), and return it with the class of its figure."""
    height, width = rng.integers(56, 97, 2)
    y, x = np.indices((height, width)) - rng.uniform(0.35, 0.65, (2, 1, 1)) * [[[height]], [[width]]]
    y, x, radius = abs(y), abs(x), rng.uniform(14, 24)
    figures = (
        np.hypot(y, x) < radius,
        np.maximum(y, x) < 0.8 * radius,
        (np.minimum(y, x) < radius / 4) & (np.maximum(y, x) < radius),
        abs(np.hypot(y, x) - 0.8 * radius) < radius / 5,
    )
    number = int(rng.integers(len(figures)))
    pixels = np.where(figures[number], rng.uniform(150, 235, (3, 1, 1)), rng.uniform(20, 90, (3, 1, 1)))
    return torch.from_numpy((pixels + rng.normal(0, 8, pixels.shape)).clip(0, 255).astype(np.uint8)), number


def make_shards(folder: Path) -> None:
    """Write five shards of JPEGs. The folder appears only when it is complete."""
    try:
        from torchvision.io import encode_jpeg
    except ImportError:
        parser.error("making images needs torchvision: pip install 'gdsdata[images]', or give --data")
    making, rng = folder.with_name(f"{folder.name}.making-{os.getpid()}"), np.random.default_rng(0)
    making.mkdir(parents=True)
    for shard in range(5):
        with tarfile.open(making / f"{shard}.tar", "w") as archive:
            for sample in range(args.images // 5):
                image, number = drawn(rng)
                for extension, content in (("jpg", encode_jpeg(image).numpy().tobytes()), ("cls", b"%d" % number)):
                    member = tarfile.TarInfo(f"{sample:06}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    making.rename(folder)


def dataset_of(shards: list[Path], shuffle: bool) -> gdsdata.GDSDataset:
    """Make batches: images uint8 (B, 3, size, size) on the device, classes int64 (B,)."""
    image = gdsdata.decoders.Image(resize=(args.size, args.size))
    return gdsdata.GDSDataset(
        shards,
        args.batch_size,
        format=gdsdata.formats.Tar(fields=(args.image, args.label)),
        shuffle=shuffle,
        device=args.device,
        fields=gdsdata.Fields(decode={args.image: image, args.label: "cls"}),
    )


folder = args.data or cache / f"train_images-{args.images}"
if args.data is None and not folder.exists():
    make_shards(folder)
shards = sorted(folder.glob("*.tar"))
if len(shards) < 2:
    parser.error(f"--data {folder} has {len(shards)} .tar files: one is held out, so two are the fewest")
held_out = shards.pop()
dataset = dataset_of(shards, shuffle=True)
print(f"{folder}: {dataset.samples:,} images in {len(shards)} shards, and {held_out.name} held out", flush=True)

# --------------------------------------------------------------------------------------------------------------- model

torch.manual_seed(0)
layers = []
for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
    layers += nn.Conv2d(inputs, outputs, 3, stride=2), nn.BatchNorm2d(outputs), nn.ReLU()
head = nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(64, args.classes)
model = nn.Sequential(*layers, *head).to(args.device)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)


def answers(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch[args.image].float() / 127.5 - 1)


# ---------------------------------------------------------------------------------------------------------------- loop

began = time.perf_counter()
for epoch in range(args.epochs):
    losses = []
    for batch in dataset:
        loss = nn.functional.cross_entropy(answers(batch), batch[args.label])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(f"epoch {epoch}: loss {torch.stack(losses).mean().item():.4f}", flush=True)  # waits for the GPU
elapsed_s = time.perf_counter() - began

model.eval()
with torch.no_grad():
    right = [(answers(batch).argmax(1) == batch[args.label]) for batch in dataset_of([held_out], shuffle=False)]
print(f"held out: {torch.cat(right).float().mean().item():.1%} of {len(torch.cat(right)):,} images right")
images_per_s = args.epochs * dataset.samples / elapsed_s
print(f"{images_per_s:,.0f} images/s read, decoded, resized, learned from, on {args.device}")
print(dataset.report())
where = "by nvJPEG, those it takes; others by the processor" if dataset.device.type == "cuda" else "by the processor"
print("decoded", where, "| served by:", {way: moved for way, moved in dataset.stats()["bytes"].items() if moved})
