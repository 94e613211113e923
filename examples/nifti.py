"""A format of one's own: NIfTI-1 volumes, a file each. `python examples/nifti.py FOLDER` reads it.

Source of the format: https://nifti.nimh.nih.gov/pub/dist/src/niftilib/nifti1.h
"""

import argparse
import math
import struct
from dataclasses import dataclass

import numpy as np

from gdsdata import GDSDataset, formats
from gdsdata.formats.index import Index, first_samples
from gdsdata.formats.parsers.damage import damaged
from gdsdata.formats.sample import Sample
from gdsdata.storage.heads import read_heads

# sizeof_hdr, dim[8], datatype, bitpix, vox_offset, scl_slope, scl_inter, magic. The bytes of the
# first are the key, because they show the byte order.
HEADERS = {struct.pack(f"{order}i", 348): (order, struct.Struct(f"{order}i36x8h14x2h34x3f224x4s")) for order in "<>"}
NIFTI_2 = struct.pack("<i", 540), struct.pack(">i", 540)
DTYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 32: "c8", 64: "f8", 256: "i1", 512: "u2", 768: "u4"}
DTYPES |= {1024: "i8", 1280: "u8", 1792: "c16"}


@dataclass(frozen=True)
class Nifti:
    """Volumes of uncompressed single files (.nii). A batch is ``(B, *dim)`` of the stored dtype.

    The first axis varies fastest in memory too: ``batch.contiguous()`` has the last one do so.
    A file ends with its volume. Bytes behind it are refused, because they show a wrong header.

    Args:
        raw: give the stored values of files that scale them (scl_slope, scl_inter). By default such
            files are refused.
    """

    raw: bool = False

    def index(self, paths: list[str]) -> Index:
        heads, size_bytes, mtime_ns = read_heads(paths, 348)
        samples, bases = [], []
        for path, head, size in zip(paths, heads, size_bytes.tolist(), strict=True):
            sample, base = self._volume(path, head, size)
            samples.append(sample)
            bases.append(base)
            if sample != samples[0]:
                one, first = (f"{each.dtype.str} of shape {each.shape}" for each in (sample, samples[0]))
                raise ValueError(f"{path}: its volume is {one}, that of {paths[0]} {first}: give them apart")
        return Index(
            paths=paths,
            size_bytes=size_bytes,
            mtime_ns=mtime_ns,
            first_sample=first_samples([1] * len(paths)),
            base_bytes=np.array(bases, np.int64),
            stride_bytes=np.full(len(paths), samples[0].bytes, np.int64),
            sample=samples[0],
        )

    def _volume(self, path: str, head: bytes, size: int) -> tuple[Sample, int]:
        """Return what a file's volume is, and where it begins."""
        if head[:2] == b"\x1f\x8b":
            raise ValueError(f"{path}: it is compressed, so its parts cannot be read: unpack it with gunzip")
        if head[:4] in NIFTI_2 and head[4:7] in (b"n+2", b"ni2"):
            raise ValueError(f"{path}: NIfTI-2 is not supported: convert it to NIfTI-1")
        if not has_magic(head):
            remedy = 'write or copy it again, or read "folder/*.nii" alone'
            raise damaged(path, 0, len(head), "it does not begin as a NIfTI-1 header of 348 bytes", remedy=remedy)
        order, header = HEADERS[head[:4]]
        _, axes, *dims, code, bits, offset, slope, inter, magic = header.unpack(head)
        if magic == b"ni1\0":
            raise ValueError(f"{path}: its data are in another file (a pair of hdr and img): save it as a single .nii")
        if not 1 <= axes <= 7 or min(dims[:axes]) < 1:
            raise damaged(path, 0, 348, f"it has {axes} dimensions, of {tuple(dims[: max(axes, 0)])}")
        if code not in DTYPES:
            raise ValueError(f"{path}: datatype {code} is not supported: convert it to one of {sorted(DTYPES)}")
        dtype, shape = np.dtype(order + DTYPES[code]), tuple(dims[:axes])
        if bits != 8 * dtype.itemsize:
            raise damaged(path, 0, 348, f"datatype {code} has {8 * dtype.itemsize} bits a value, bitpix says {bits}")
        if not 352 <= offset <= size or offset != int(offset):
            raise damaged(path, 0, 348, f"its data begin at {offset}, in {size} bytes")
        end = int(offset) + math.prod(shape) * dtype.itemsize
        if end != size:
            raise damaged(path, 0, 348, f"it has {size} bytes, and {dtype.str} of shape {shape} end at {end}")
        if not self.raw and not (slope == 0 or (slope, inter) == (1, 0) or math.isnan(slope)):
            raise ValueError(f"{path}: its values are scaled by {slope} and {inter}: pass raw=True for the stored ones")
        return Sample(dtype, shape, fortran_order=True), int(offset)


def has_magic(head: bytes) -> bool:
    return head[:4] in HEADERS and head[344:348] in (b"n+1\0", b"ni1\0")


def is_nifti(head: bytes, path: str) -> bool:
    return has_magic(head) or path.lower().endswith((".nii", ".nii.gz"))


formats.register("NIfTI", is_nifti, Nifti)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of .nii files")
    for batch in GDSDataset(parser.parse_args().folder, batch_size=4):
        print(tuple(batch.shape), batch.dtype, batch.device)
