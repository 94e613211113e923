"""Data of case=train: text from a seed, volumes, JPEGs in tars; or the user's own."""

import os

import numpy as np

from gdsdata.bench.data import images, sources
from gdsdata.bench.data.made import data_folder, keep

WORDS, LONGEST_WORD = 4096, 9
WORDS_A_TIME = 2**20


def source_for(work, settings, case, progress=lambda count: None):
    """Return the Source of "text", "volumes" or "images" from the settings."""
    if work == "volumes":
        return sources.source_for("npy", settings, progress)
    folder = data_folder(settings)
    if work == "images":
        return images.source_in(folder, case, progress)
    if settings.path:
        files, origin = sources.expand(settings.path), f"your own: {settings.path}"
    else:
        size, seed = settings.size_bytes, case.seed
        name, parameters = f"text-{size}-{seed}.txt", {"kind": "text", "size_bytes": size, "seed": seed}
        made = keep(folder, name, parameters, size, lambda target: write_text(target, size, seed, progress))
        files, origin = [os.path.abspath(made)], f"words drawn from a seed: {made}"
    return sources.describe_tokens(files, "uint8", settings.seq_len, settings.stride, origin)


def write_text(target, size_bytes, seed, progress):
    """Write words of a made-up language, some of them much more frequent than others."""
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
