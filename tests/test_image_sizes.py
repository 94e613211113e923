"""Images whose headers say more pixels than a loader should make of few bytes."""

import io
import re
import struct
import zlib

import pytest
import torch

from gdsdata.decoders import Image, Threads, Undecodable, images

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision.io")
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")


def sample(content):
    return torch.tensor(list(content), dtype=torch.uint8)


def png_of(width, height):
    """Return a PNG of one bit a pixel, all black: a file has about a byte for 8000 pixels."""
    rows = zlib.compress(bytes((1 + -(-width // 8)) * height), 9)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", rows), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_an_image_with_more_pixels_than_allowed_is_refused_before_it_is_decoded(monkeypatch):
    threads, content = Threads(most_kept=1), sample(png_of(300, 200))
    try:
        decoded = Image(most_pixels=60_000).decode([content], torch.device("cpu"), threads)
        assert decoded[0].shape == (3, 200, 300)
        monkeypatch.setattr(images, "codec", lambda: pytest.fail("it is decoded"))
        with pytest.raises(Undecodable, match="60000 pixels, more than"):
            Image(most_pixels=59_999).decode([content], torch.device("cpu"), threads)
    finally:
        threads.close(wait=True)


def test_a_jpeg_with_more_pixels_than_allowed_is_not_sent_to_a_gpu():
    content = io.BytesIO()
    PIL.new("RGB", (40, 30)).save(content, "JPEG")
    jpeg = sample(content.getvalue())
    assert images.pixels_of(jpeg) == 1200
    assert Image(most_pixels=1200)._is_for_gpu(jpeg) and not Image(most_pixels=1199)._is_for_gpu(jpeg)


@pytest.mark.parametrize(
    ("content", "pixels"),
    [
        (png_of(24, 10), 240),
        (b"GIF89a" + struct.pack("<HH", 65535, 65535), 65535**2),
        (b"\xff\xd8\xff\xe0\0\4JF\xff\xff\xdb\0\2\xff\xc2\0\x11\x08\xff\xfe\xff\xff\3", 65534 * 65535),
        (b"\xff\xd8\xff\xc4\0\2\xff\xc0\0\x11\x08\0\3\0\5\3", 15),
        (b"\xff\xd8\xff\xc0\0\x11\x08\0", 0),
        (b"\xff\xd8" + b"\xff" * 1000, 0),
        (b"", 0),
        (b"no image at all", 0),
    ],
    ids=["png", "gif", "progressive", "behind a table", "cut off", "fill", "empty", "other"],
)
def test_the_pixels_that_a_header_says_are_counted(content, pixels):
    assert images.pixels_of(sample(content)) == pixels


@pytest.mark.parametrize(
    ("most_pixels", "error"),
    [("x", TypeError), (None, TypeError), (2.5, TypeError), (True, TypeError), (0, ValueError)],
)
def test_a_bound_on_pixels_that_is_none_is_refused_before_an_image_comes(most_pixels, error):
    said = re.escape(f"Image(most_pixels={most_pixels!r}): it is a whole number of pixels, 1 or more")
    with pytest.raises(error, match=f"^{said}$"):
        Image(most_pixels=most_pixels)
