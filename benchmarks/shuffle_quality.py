"""Measure how well orders shuffle, and how much memory they hold.

    python benchmarks/shuffle_quality.py [--out FOLDER]

The data has 262144 samples, sorted by class, in files of 64 or 4096. Files of 64 are the best case
for orders that open whole files. A piece is 64 samples. Each order may hold some number of samples
in memory. It is judged by its global batches of 256 over three epochs:

- pairs: pairs of samples of one piece in one batch, as a multiple of a uniform shuffle's. Neighbors
  in the files that stay neighbors in time raise it. 1 is uniform, 0 is none.
- chi-square: of a batch's classes, by degree of freedom. A uniform shuffle has 1. If batches lean
  to some classes, it is higher; if they are more even than chance, it is lower.

Other projects' orders are models of their documentation; none of their code runs. Each model has
one process without workers, but up to 64 readers for files side by side. Prints a table, and writes
it with a plot. Figures depend on the seed alone.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from gdsdata.data.order.lanes import Lanes
from gdsdata.data.order.permutation import Permutation

SAMPLES, PIECE, BATCH, CLASSES, EPOCHS = 2**18, 2**6, 2**8, 2**6, 3
FILES = [2**6, 2**12]  # samples in a file
LANES = 16
MOST_READERS = 64
MEMORIES = [2**10, 2**12, 2**14, 2**16]  # in samples


def files_in_turn(rng, file):
    """Return sample ids: the files in random order, each from begin to end."""
    return (rng.permutation(SAMPLES // file)[:, None] * file + np.arange(file)).ravel()


def uniform(memory, file, epoch):
    return Permutation(SAMPLES, 0, epoch)(np.arange(SAMPLES))


def lanes(memory, file, epoch):
    shape = Lanes(LANES, memory // (LANES * PIECE), PIECE)
    return shape.permutation(SAMPLES, BATCH, 0, epoch)(np.arange(SAMPLES))


def buffered(memory, file, epoch):
    """Model WebDataset and tf.data: files in random order, and a shuffle buffer."""
    rng = np.random.default_rng(epoch)
    stream, out = files_in_turn(rng, file), np.empty(SAMPLES, np.int64)
    buffer, places = stream[:memory].copy(), rng.integers(0, memory, SAMPLES)
    for i, sample in enumerate(stream[memory:]):
        out[i], buffer[places[i]] = buffer[places[i]], sample
    out[SAMPLES - memory :] = rng.permutation(buffer)
    return out


def blocks(memory, file, epoch):
    """Model MosaicML's py1b: files in random order, then shuffled stretches of equal length."""
    rng = np.random.default_rng(epoch)
    return rng.permuted(files_in_turn(rng, file).reshape(-1, memory), axis=1).ravel()


def expanded(memory, file, epoch):
    """Model MosaicML's py1e: files in random order, each shuffled within a stretch."""
    rng = np.random.default_rng(epoch)
    half = max(memory, file) / 2
    centre = np.repeat(np.arange(SAMPLES // file) * file + file / 2, file)
    low, high = np.maximum(centre - half, 0), np.minimum(centre + half, SAMPLES)
    return files_in_turn(rng, file)[np.argsort(rng.uniform(low, high))]


def files_side_by_side(memory, file, epoch):
    """Model LitData: as many readers as files fit into memory, each with files of its own."""
    rng = np.random.default_rng(epoch)
    readers = min(MOST_READERS, max(1, memory // file))
    streams = rng.permuted(files_in_turn(rng, file).reshape(-1, file), axis=1).reshape(readers, -1)
    return streams.reshape(readers, -1, BATCH // readers).swapaxes(0, 1).ravel()


ORDERS = {
    "uniform": uniform,
    "lanes": lanes,
    "buffer (WebDataset, tf.data)": buffered,
    "block (MosaicML py1b)": blocks,
    "expanded (MosaicML py1e)": expanded,
    "files side by side (LitData)": files_side_by_side,
}


def pairs(batches):
    """Return the pairs of one piece in one batch, divided by a uniform shuffle's mean."""
    pieces = np.sort(batches // PIECE, axis=1)
    # A sorted row of c equal values has c - 1 pairs at distance one, c - 2 at distance two, and so
    # on: c * (c - 1) / 2 in all.
    same = sum((pieces[:, apart:] == pieces[:, :-apart]).sum() for apart in range(1, PIECE))
    expected = BATCH * (BATCH - 1) / 2 * (PIECE - 1) / (SAMPLES - 1)
    return same / len(batches) / expected


def chi_square(batches):
    """Return the mean chi-square of a batch's classes by degree of freedom: uniform is 1."""
    classes = batches // (SAMPLES // CLASSES)
    counts = np.stack([np.bincount(row, minlength=CLASSES) for row in classes])
    expected = BATCH / CLASSES
    finite = (SAMPLES - BATCH) / (SAMPLES - 1)
    return ((counts - expected) ** 2).sum(1).mean() / expected / (CLASSES - 1) / finite


def measured():
    for name, order in ORDERS.items():
        for file in FILES if order not in (uniform, lanes) else [None]:
            for memory in MEMORIES if order is not uniform else [BATCH]:
                if file is not None and memory < file:
                    continue  # the order holds at least one open file
                epochs = [order(memory, file, epoch) for epoch in range(EPOCHS)]
                for ids in epochs:
                    if not (np.bincount(ids, minlength=SAMPLES) == 1).all():
                        raise AssertionError(f"{name} does not give every sample once")
                batches = np.concatenate(epochs).reshape(-1, BATCH)
                yield {
                    "order": name,
                    "file_samples": file,
                    "memory_samples": memory,
                    "pairs": round(float(pairs(batches)), 3),
                    "chi_square": round(float(chi_square(batches)), 3),
                }


def table(rows):
    lines = ["| order | samples in a file | memory, samples | pairs | chi-square |", "|---|---|---|---|---|"]
    for row in rows:
        file = row["file_samples"] or "any"
        lines.append(
            f"| {row['order']} | {file} | {row['memory_samples']} | {row['pairs']:.2f} | {row['chi_square']:.2f} |"
        )
    return "\n".join(lines)


def plot(rows, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 9), sharex=True, sharey="row", layout="constrained")
    titles = {"pairs": "pairs of a piece in a batch, x uniform", "chi_square": "class chi-square by degree of freedom"}
    for key, line in zip(titles, axes, strict=True):
        for file, axis in zip(FILES, line, strict=True):
            for name in list(ORDERS)[1:]:
                mine = [row for row in rows if row["order"] == name and row["file_samples"] in (file, None)]
                style = dict(linewidth=3, zorder=3) if name == "lanes" else {}
                memories = [row["memory_samples"] for row in mine]
                axis.plot(memories, [row[key] for row in mine], "o-", label=name, **style)
            axis.axhline(1, color="black", ls="--", label="uniform")
            axis.set(xscale="log", yscale="log", xlabel=f"samples held in memory, of {SAMPLES}")
            axis.set_title(f"{titles[key]}: files of {file}")
            axis.set_xticks(MEMORIES, list(map(str, MEMORIES)))
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.suptitle(f"Sorted by class, pieces of {PIECE} samples, global batches of {BATCH}")
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("outputs/shuffle"))
    out = parser.parse_args().out
    rows = list(measured())
    print(table(rows))
    out.mkdir(parents=True, exist_ok=True)
    (out / "quality.md").write_text(table(rows) + "\n")
    (out / "quality.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows, out / "quality.png")


if __name__ == "__main__":
    main()
