"""A format of one's own: IDX files, in which MNIST comes. `python examples/own_format.py FOLDER`.

Source of the format: http://yann.lecun.com/exdb/mnist (the magic's third byte is the dtype, its
fourth the dimensions).
"""

import argparse
import struct

import numpy as np

from gdsdata import GDSDataset, formats
from gdsdata.formats.index import Index, first_samples
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.sample import Sample
from gdsdata.storage.heads import read_heads

DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


class Idx:
    def index(self, paths):
        heads, size_bytes, mtime_ns = read_heads(paths, 4 + 4 * 255)
        samples, counts, bases = [], [], []
        for path, head, size in zip(paths, heads, size_bytes, strict=True):
            if not is_idx(head, path):
                raise damaged(path, 0, 4, "it does not begin as an IDX file")
            bases.append(4 + 4 * head[3])
            count, *shape = struct.unpack_from(f">{head[3]}I", head.ljust(bases[-1], b"\0"), 4)
            samples.append(Sample(np.dtype(DTYPES[head[2]]), tuple(shape)))
            counts.append(count)
            if samples[-1] != samples[0]:
                raise ValueError(f"{path}: its samples are not like those of {paths[0]}: give them apart")
            if bases[-1] + count * samples[0].bytes != size:
                raise damaged(path, 0, bases[-1], f"{size} bytes are not {count} samples of {tuple(shape)}")
        strides = np.full(len(paths), samples[0].bytes, np.int64)
        return Index(paths, size_bytes, mtime_ns, first_samples(counts), np.array(bases), strides, samples[0])


def is_idx(head, path):
    return head[:2] == b"\0\0" and head[2:3] in map(bytes, zip(DTYPES)) and head[3:4] > b"\0"


formats.register("IDX", is_idx, Idx)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of IDX files")
    for batch in GDSDataset(parser.parse_args().folder, batch_size=64):
        print(tuple(batch.shape), batch.dtype, batch.device)
