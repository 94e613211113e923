"""Small parsers: manifests of checkpoints, and the heads of images. Targets of `fuzz.py`."""

import struct
from pathlib import Path

import numpy as np
import torch
from fuzz_target import Files, Target

from gdsdata.checkpoint.background import manifest
from gdsdata.checkpoint.background.manifest import Manifest, SavedFile
from gdsdata.decoders import images


def read_manifest(folder: Path) -> None:
    """Read a manifest as that of a folder's first step."""
    path = folder / "manifest.json"
    found = manifest.parsed_manifest(path.read_bytes(), 1, str(path))
    assert found.step == 1 and 0 <= found.sequence < 2**63
    for file in found.files:
        assert "/" not in file.name and 0 <= file.size_bytes < 2**63, "a file leaves its folder"
    assert manifest.parsed_manifest(found.content, 1, str(path)) == found


def _write_manifest(folder: Path, ranks: int) -> None:
    files = tuple(SavedFile(f"rank-{rank}-0123abcd.pt", 4096 * rank) for rank in range(ranks))
    (folder / "manifest.json").write_bytes(Manifest(1, 7, files).content)


MANIFEST = Target(
    "manifest",
    (manifest,),
    [lambda folder: _write_manifest(folder, 2), lambda folder: _write_manifest(folder, 0)],
    read_manifest,
    tokens=(
        *(b"null", b"true", b"-1", b"1e400", b"NaN", b"[", b"]", b"{", b"}", b'""', b"9" * 5000, b"\\ud800"),
        *(b'"../rank-0-0123abcd.pt"', b'"step"', b'"files"', b'"name"', b'"size_bytes"', b'"format"'),
    ),
)


def read_image_head(folder: Path) -> None:
    """Look at the head of an image as a data set does before it is decoded."""
    content = torch.from_numpy(np.frombuffer((folder / "x.img").read_bytes(), np.uint8).copy())
    assert 0 <= images.pixels_of(content) < 2**64
    assert images.is_plain_jpeg(content) in (True, False)


def _mend_image(files: Files) -> Files:
    """Repair the end, which a plain JPEG has."""
    return {"x.img": files["x.img"][:-2] + b"\xff\xd9"} if files["x.img"][:2] == b"\xff\xd8" else files


_FRAME = b"\0\x11\x08\0\x20\0\x10\3\1\x22\0\2\x11\1\3\x11\1"
_EXIF = b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0"

IMAGE_HEADS = Target(
    "image-heads",
    (images,),
    [
        lambda folder: (folder / "x.img").write_bytes(b"\xff\xd8\xff\xe0\0\4JF\xff\xc0" + _FRAME + b"\xff\xd9"),
        lambda folder: (folder / "x.img").write_bytes(
            b"\xff\xd8\xff\xe1" + struct.pack(">H", len(_EXIF) + 2) + _EXIF + b"\xff\xc2" + _FRAME + b"\xff\xd9"
        ),
        lambda folder: (folder / "x.img").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\x10\0\0\0\x20"),
        lambda folder: (folder / "x.img").write_bytes(b"GIF89a\x10\0\x20\0"),
    ],
    read_image_head,
    _mend_image,
    (b"\xff\xd8", b"\xff\xc0", b"\xff\xe1", b"\xff\xff", b"Exif\0\0", b"MM\0*", b"\x12\1\3\0"),
)
