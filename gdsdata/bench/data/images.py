"""JPEGs in WebDataset tars; pixels say their number, so any order can be checked."""

import contextlib
import importlib.util
import io
import os
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from gdsdata.bench.data.made import keep
from gdsdata.bench.data.sources import Source

SHARDS = 64  # WebDataset gives each worker some of them.
BITS, BIT_PIXELS = 16, 16  # An image says its number in squares along its upper edge.
QUALITY = 90


def missing():
    """Why there can be no images here; "" where there can."""
    there = importlib.util.find_spec("torchvision") is not None
    return "" if there else "torchvision is not installed (pip install gdsdata[images])"


def image(number, size):
    """Return uint8 (3, height, width): waves, noise, and the number in squares."""
    height, width = size
    rng = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / rng.uniform(5, 50)) + np.sin(y / rng.uniform(5, 50)) for _ in range(3)]
    pixels = 128 + 40 * np.stack(waves) + rng.normal(0, 12, (3, height, width))
    for bit in range(BITS):
        pixels[:, :BIT_PIXELS, bit * BIT_PIXELS : (bit + 1) * BIT_PIXELS] = 255 * (number >> bit & 1)
    return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8))


def encoded(number, size):
    import torchvision

    return torchvision.io.encode_jpeg(image(number, size), quality=QUALITY).numpy().tobytes()


def numbers_in(batch):
    """Which images a batch (B, 3, height, width) has: a list of whole numbers."""
    middles = batch[:, 1, BIT_PIXELS // 2, BIT_PIXELS // 2 : BITS * BIT_PIXELS : BIT_PIXELS].cpu() > 127
    return (middles * 2 ** torch.arange(BITS)).sum(1).tolist()


def write_shards(folder, samples, content, extension, each=lambda number: None, shards=SHARDS):
    """Write a new folder of tars; sample `number` is one member, `content(number)`."""
    folder.mkdir()
    for shard, numbers in enumerate(np.array_split(np.arange(samples), min(shards, samples))):
        with ThreadPoolExecutor() as many, tarfile.open(folder / f"{shard:05}.tar", "w") as archive:
            for number, written in zip(numbers.tolist(), many.map(content, numbers.tolist()), strict=True):
                member = tarfile.TarInfo(f"{number:06}.{extension}")
                member.size = len(written)
                archive.addfile(member, io.BytesIO(written))
                each(number)


def places(shards):
    """Return [(file, offset, bytes)] of the members of all shards, in order."""
    found = []
    for path in shards:
        with contextlib.closing(tarfile.open(path)) as archive:
            found += [(path, member.offset_data, member.size) for member in archive.getmembers() if member.isfile()]
    return found


def decoded(stored):
    """uint8 (3, height, width) of a JPEG's bytes, by torchvision on the CPU."""
    import torchvision

    return torchvision.io.decode_jpeg(torch.frombuffer(bytearray(stored), dtype=torch.uint8))


def read(place):
    path, offset, size = place
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        return decoded(file.read(size))


def source_in(folder, case, progress):
    """Return the Source of made images; `progress` gets bytes of pixels."""
    height, width = case.image_size
    pixels_bytes = 3 * height * width
    parameters = {"kind": "images", "images": case.images, "size": [height, width], "shards": SHARDS}

    def write(target):
        content, each = (lambda number: encoded(number, (height, width))), (lambda _: progress(pixels_bytes))
        write_shards(target, case.images, content, "jpg", each)

    made = keep(folder, f"images-{height}x{width}-{case.images}", parameters, case.images * pixels_bytes, write)
    shards = sorted(str(path.resolve()) for path in made.iterdir())
    counts = [len(places([shard])) for shard in shards]
    size, origin = sum(map(os.path.getsize, shards)), f"waves and noise as JPEGs: {made}"
    return Source("images", shards, "uint8", [3, height, width], 0, [0] * len(shards), counts, size, origin)
