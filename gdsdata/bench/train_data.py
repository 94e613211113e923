"""What case=train reads: text made from a seed, volumes, and JPEGs in tars; or the user's own text or volumes."""

import os
from pathlib import Path

import numpy as np

from gdsdata.bench import data, image_shards

WORDS, LONGEST_WORD = 4096, 9
WORDS_A_TIME = 2**20


def source_for(work, settings, case, progress=lambda count: None):
    """The Source of "text", "volumes" or "images", from DataSettings and TrainSettings."""
    if work == "volumes":
        return data.source_for("npy", settings, progress)
    folder = Path(settings.folder).expanduser() if settings.folder else data.default_folder()
    if work == "images":
        return images_in(folder, case, progress)
    files, origin = data.expand(settings.path) if settings.path else None, f"your own: {settings.path}"
    if not files:
        parameters = {"maker": data.MAKER, "kind": "text", "size_bytes": settings.size_bytes, "seed": case.seed}
        name = f"text-{settings.size_bytes}-{case.seed}.txt"
        made = data.keep(
            folder,
            name,
            parameters,
            settings.size_bytes,
            lambda target: write_text(target, settings.size_bytes, case.seed, progress),
        )
        files, origin = [os.path.abspath(made)], f"words drawn from a seed: {made}"
    return data.describe_tokens(files, "uint8", settings.seq_len, settings.stride, origin)


def write_text(target, size_bytes, seed, progress):
    """Words of a made-up language, some of which are much more frequent than others, with spaces between them."""
    generator = np.random.Generator(np.random.SFC64(seed))
    lengths = generator.integers(2, LONGEST_WORD + 2, WORDS)  # with the space behind it
    starts = np.concatenate([[0], np.cumsum(lengths)])
    letters = generator.integers(ord("a"), ord("z") + 1, starts[-1]).astype(np.uint8)
    letters[starts[1:] - 1] = ord(" ")
    left = size_bytes
    with open(target, "wb") as out:
        while left:
            chosen = (WORDS * generator.random(WORDS_A_TIME) ** 3).astype(np.int64)
            ends = np.cumsum(lengths[chosen])
            places = np.arange(ends[-1]) + np.repeat(starts[chosen] - ends + lengths[chosen], lengths[chosen])
            text = letters[places][:left]
            out.write(text)
            left -= len(text)
            progress(len(text))
        out.flush()
        os.fsync(out.fileno())


def images_in(folder, case, progress):
    """JPEGs, WebDataset's way; `progress` gets bytes of pixels."""
    height, width = case.image_size
    pixels_bytes = 3 * height * width
    parameters = {"maker": data.MAKER, "kind": "images", "images": case.images, "size": [height, width]}
    parameters["shards"] = image_shards.SHARDS

    def write(target):
        target.mkdir()
        image_shards.write_shards(
            target,
            case.images,
            lambda number: image_shards.encoded(number, (height, width)),
            "jpg",
            lambda number: progress(pixels_bytes),
        )

    made = data.keep(folder, f"images-{height}x{width}-{case.images}", parameters, case.images * pixels_bytes, write)
    shards = sorted(str(path.resolve()) for path in made.iterdir())
    counts = [len(image_shards.places([shard])) for shard in shards]
    size = sum(map(os.path.getsize, shards))
    headers, origin = [0] * len(shards), f"waves and noise as JPEGs: {made}"
    return data.Source("images", shards, "uint8", [3, height, width], 0, headers, counts, size, origin)
