"""Encoded images: the decoded values, the library, the device, and errors of damaged images."""

import contextlib
import gc
import io
import os
import threading
import time

import numpy as np
import pytest
import torch
from helpers import eventually, grouped
from test_fields import Members, decoded

import gdsdata
from gdsdata import EngineOptions, GDSDataset, decoders
from gdsdata.data.batches.fields import FieldReader
from gdsdata.data.batches.settings import BatchSettings
from gdsdata.decoders import Image, Threads, images
from gdsdata.errors import CorruptData
from gdsdata.formats.extents import Extents
from gdsdata.formats.fields import Field, FieldIndex
from gdsdata.io import engine

PIL, PIL_OPS = pytest.importorskip("PIL.Image"), pytest.importorskip("PIL.ImageOps")
codec = pytest.importorskip("torchvision.io") and images.codec()
pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")

CPU = torch.device("cpu")


def photo(height=40, width=60, seed=0):
    """Make a PIL image whose colors change slowly, which suits JPEG."""
    few = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), np.uint8)
    return PIL.fromarray(few).resize((width, height), PIL.Resampling.BICUBIC)


def encoded(image, kind="JPEG", **arguments):
    content = io.BytesIO()
    image.save(content, kind, **arguments)
    return content.getvalue()


def pixels(image):
    return torch.from_numpy(np.asarray(image.convert("RGB")).copy()).permute(2, 0, 1)


def sample(content):
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


def turned(orientation):
    exif = PIL.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def difference(a, b):
    return int((a.cpu().int() - b.cpu().int()).abs().max())


# ------------------------------------------------------------------------------------------------- what images become


def test_images_of_one_size_are_stacked_whatever_their_formats(tmp_path):
    photos = [photo(seed=seed) for seed in range(3)]
    contents = [encoded(one, kind, lossless=True) for one, kind in zip(photos, ("PNG", "WEBP", "PNG"), strict=True)]
    found = decoded(tmp_path, contents, "image")
    assert found.dtype == torch.uint8 and torch.equal(found, torch.stack(list(map(pixels, photos))))


def test_a_jpeg_is_what_the_library_says(tmp_path):
    contents = [encoded(photo(seed=seed)) for seed in range(9)]
    found = decoded(tmp_path, contents, "image")
    assert torch.equal(found, torch.stack([codec.decode(sample(one), "RGB") for one in contents]))
    assert difference(found[0], pixels(photo())) < 40


def test_images_of_several_sizes_are_a_list(tmp_path):
    found = decoded(tmp_path, [encoded(photo(40, 60)), encoded(photo(30, 20))], "image")
    assert [tuple(one.shape) for one in found] == [(3, 40, 60), (3, 30, 20)]


def test_a_resize_makes_one_size_of_them_antialiased(tmp_path):
    sizes = [(80, 90), (40, 60), (25, 31)]
    photos = [photo(*size, seed=seed) for seed, size in enumerate(sizes)]
    found = decoded(tmp_path, [encoded(one, "PNG") for one in photos], Image(resize=(40, 60)))
    assert found.shape == (3, 3, 40, 60) and found.dtype == torch.uint8
    assert torch.equal(found[1], pixels(photos[1]))
    for i in (0, 2):
        one = pixels(photos[i])[None].float()
        exact = torch.nn.functional.interpolate(one, (40, 60), mode="bilinear", antialias=True)[0]
        assert difference(found[i], exact.round()) <= 1


def test_gray_has_one_channel_of_luma_whatever_the_format(tmp_path):
    luma = torch.from_numpy(np.asarray(photo().convert("L")).copy())
    contents = [encoded(photo(), "PNG"), encoded(photo(), "WEBP", lossless=True), encoded(photo().convert("L"), "PNG")]
    found = decoded(tmp_path, contents, Image(mode="GRAY"))
    assert found.shape == (3, 1, 40, 60) and difference(found, luma.expand(3, 1, 40, 60)) <= 1


def test_every_kind_of_color_becomes_rgb_of_eight_bits():
    def rgb(content):
        return codec.decode(sample(content), "RGB")

    gray, deep = photo().convert("L"), np.arange(2400, dtype=np.uint16).reshape(40, 60) * 27
    assert torch.equal(rgb(encoded(gray, "PNG")), pixels(gray))
    assert torch.equal(rgb(encoded(photo().convert("P"), "PNG")), pixels(photo().convert("P")))
    transparent = photo().convert("RGBA")
    transparent.putalpha(7)
    assert torch.equal(rgb(encoded(transparent, "PNG")), pixels(photo()))
    exact = torch.from_numpy(deep.astype(np.float64) / 257).round().expand(3, 40, 60)
    assert torch.equal(rgb(encoded(PIL.fromarray(deep), "PNG")), exact.to(torch.uint8))
    cmyk = photo().convert("CMYK")
    assert rgb(encoded(cmyk)).shape == (3, 40, 60) and difference(rgb(encoded(cmyk)), pixels(cmyk)) < 60
    film = encoded(photo(), "GIF", save_all=True, append_images=[photo(seed=1)])
    assert torch.equal(rgb(film), rgb(encoded(photo(), "GIF")))


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_pixels_of_a_palette_have_their_own_color(kind):
    few = photo().quantize(16)
    content = encoded(few, kind, transparency=few.getpixel((0, 0)))
    assert torch.equal(codec.decode(sample(content), "RGB"), pixels(few.convert("RGB")))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_that_exif_says_is_turned_is_decoded_upright(kind):
    upright = codec.decode(sample(encoded(photo(), kind)), "RGB")
    found = codec.decode(sample(encoded(photo(), kind, exif=turned(6))), "RGB")  # 6: the top is on the right
    assert torch.equal(found, upright.rot90(-1, (1, 2)))


@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"], ids=["tiff", "exif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_webp_comes_upright_as_exif_says(orientation, prefix):
    exif = prefix + turned(orientation).removeprefix(b"Exif\0\0")
    content = encoded(photo(), "WEBP", lossless=True, exif=exif, icc_profile=b"odd")
    upright = PIL_OPS.exif_transpose(PIL.open(io.BytesIO(content)))
    assert torch.equal(codec.decode(sample(content), "RGB"), pixels(upright))


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("damaged", [b"", b"no image", encoded(photo())[:700], encoded(photo(), "PNG")[:99]], ids=len)
def test_a_damaged_image_is_named_with_its_place(tmp_path, damaged):
    contents = [encoded(photo()), encoded(photo(), "PNG"), damaged, encoded(photo())]
    with pytest.raises(CorruptData, match=r"members: field 'x' of \d+ bytes at offset \d+ cannot be decoded") as raised:
        decoded(tmp_path, contents, "image")
    assert (raised.value.offset, raised.value.length) == (len(contents[0]) + len(contents[1]), len(damaged))
    assert ".cpp" not in str(raised.value)


def test_the_first_damaged_image_of_a_batch_is_the_one_that_is_named(tmp_path):
    contents = [encoded(photo())] * 5 + [b"??"] * 7
    for _ in range(5):
        with pytest.raises(CorruptData) as raised:
            decoded(tmp_path, contents, "image")
        assert raised.value.offset == 5 * len(contents[0])


def test_mistakes_in_an_images_settings_are_errors_at_once():
    for mistake, named in (({"mode": "BGR"}, "BGR"), ({"resize": (0, 4)}, "height"), ({"resize": (4,)}, "height")):
        with pytest.raises(ValueError, match=named):
            Image(**mistake)
    for mistake in (224, "big", (8.5, 8), (224, "x")):
        with pytest.raises(TypeError, match=r"resize=.*: it is \(height, width\) in pixels, as in \(224, 224\)"):
            Image(resize=mistake)
    for mistake in ("jpg", 7):
        with pytest.raises(ValueError, match=f"decode={mistake!r}"):
            decoders.decoder_of(mistake)
    with pytest.raises(TypeError, match=r"the class Image: write Image\(\), or Image\(resize=...\)"):
        decoders.decoder_of(Image)


# ------------------------------------------------------------------------------------------- ahead of who takes batches


def read(folder, contents, batch_size, **arguments):
    (folder / "members").write_bytes(b"".join(contents))
    return GDSDataset(
        folder / "members", batch_size, Members("x", contents), device="cpu", shuffle=False, **grouped(arguments)
    )


def test_order_is_kept_when_batches_take_unequally_long(tmp_path):
    photos = [photo(*((200, 300) if i % 6 == 0 else (4, 6)), seed=i) for i in range(24)]
    data = read(tmp_path, [encoded(one, "PNG") for one in photos], 2, decode={"x": "image"}, prefetch=6)
    found = [image for batch in data for image in batch["x"]]
    assert len(found) == 24 and all(map(torch.equal, found, map(pixels, photos)))


def test_decoding_runs_ahead_on_other_threads_and_no_further_than_prefetch(tmp_path, monkeypatch):
    seen, decode = [], codec.decode

    def watched(content, mode):
        seen.append(threading.current_thread())
        return decode(content, mode)

    monkeypatch.setattr(images, "codec", lambda: codec._replace(decode=watched))
    batches = iter(read(tmp_path, [encoded(photo())] * 40, 4, decode={"x": "image"}, prefetch=3))
    for _ in range(4):
        next(batches)
    assert eventually(lambda: len(seen) == 4 * (4 + 3))
    time.sleep(0.1)
    assert len(seen) == 28 and threading.current_thread() not in seen
    batches.close()
    others = {"gdsdata-access"}  # of the process, once it has read a URL
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("gdsdata-")}
    assert names <= others


def test_a_batch_that_is_kept_stays_as_it_is_and_the_memory_of_others_is_used_again(tmp_path):
    contents = [encoded(photo(seed=i), "PNG") for i in range(80)]
    kept = [batch["x"] for batch in read(tmp_path, contents, 4, decode={"x": "image"}, prefetch=2)]
    assert torch.equal(torch.cat(kept), torch.stack([codec.decode(sample(one), "RGB") for one in contents]))
    one = kept[3][2]  # a view of one keeps its memory too
    expected, places = one.clone(), set()
    del kept
    gc.collect()
    for batch in read(tmp_path, contents, 4, decode={"x": "image"}, prefetch=2):
        places.add(batch["x"].data_ptr())
    assert torch.equal(one, expected) and len(places) <= 6, "20 batches, of which at most 2 + 2 were there at once"


def test_a_users_function_runs_on_the_thread_that_takes_the_batch(tmp_path):
    seen = []

    def mine(samples):
        seen.append(threading.current_thread())
        return len(samples)

    assert [batch["x"] for batch in read(tmp_path, [b"a"] * 6, 2, decode={"x": mine})] == [2, 2, 2]
    assert set(seen) == {threading.current_thread()}


def test_encoded_bytes_come_as_they_are_and_stay(tmp_path):
    contents = [bytes([i]) * (i + 1) for i in range(20)]
    kept = [one for batch in read(tmp_path, contents, 3, decode={"x": "encoded"}) for one in batch["x"]]
    assert [one.numpy().tobytes() for one in kept] == contents


# -------------------------------------------------------------------------------- which image is decoded by what, where


def test_torchcodec_is_taken_where_it_decodes_images_and_torchvision_elsewhere(monkeypatch):
    asked = []

    class Torchcodec:
        @staticmethod
        def decode_image(content, mode):
            return content.view(1, 1, -1)

        @staticmethod
        def decode_jpeg(contents, mode, device):
            asked.append((contents, mode, device))
            return contents

    def importing(found):
        def find(name):
            assert name in ("torchcodec.decoders", "torchvision.io")
            if name not in found:
                raise ImportError(name)
            return found[name]

        monkeypatch.setattr(images.importlib, "import_module", find)
        images.codec.cache_clear()
        return images.codec()

    vision = pytest.importorskip("torchvision.io")
    with contextlib.ExitStack() as after:
        after.callback(images.codec.cache_clear)
        assert importing({"torchvision.io": vision}).name == "torchvision"
        older = type("Older", (), {"VideoDecoder": object})
        assert importing({"torchvision.io": vision, "torchcodec.decoders": older}).name == "torchvision"
        newer = importing({"torchvision.io": vision, "torchcodec.decoders": Torchcodec})
        assert newer.name == "torchcodec" and newer.decode(torch.arange(3), "RGB").shape == (1, 1, 3)
        newer.decode_jpegs(("a", "b"), "GRAY", "cuda:1")
        assert asked == [(["a", "b"], "GRAY", "cuda:1")]
        with pytest.raises(ImportError, match="gdsdata\\[images\\]"):
            importing({})


PLAIN = {
    "baseline": {}, "progressive": {"progressive": True}, "with a comment": {"comment": b"x" * 500},
    "EXIF, upright": {"exif": turned(1)}, "EXIF, which says nothing": {"exif": PIL.Exif().tobytes()},
}  # fmt: skip


@pytest.mark.parametrize("arguments", PLAIN.values(), ids=PLAIN)
def test_a_plain_jpeg_is_for_the_gpu(arguments):
    assert images.is_plain_jpeg(sample(encoded(photo(), **arguments)))
    assert images.is_plain_jpeg(sample(encoded(photo().convert("L"), **arguments)))


def test_images_that_the_gpu_would_decode_differently_are_no_plain_jpegs():
    jpeg = encoded(photo())
    others = [encoded(photo(), kind) for kind in ("PNG", "WEBP", "GIF")]
    others += [encoded(photo(), exif=turned(orientation)) for orientation in range(2, 9)]
    others += [encoded(photo().convert("CMYK")), b"", b"\xff\xd8", jpeg[:-2], jpeg[:300]]
    assert not any(images.is_plain_jpeg(sample(one)) for one in others)


def test_damaged_headers_are_looked_at_without_an_error():
    chance, jpeg = np.random.default_rng(0), encoded(photo(), exif=turned(3))
    for _ in range(3000):
        damaged = np.frombuffer(jpeg, np.uint8).copy()
        damaged[chance.integers(2, 300, 3)] = chance.integers(0, 256, 3)
        images.is_plain_jpeg(torch.from_numpy(damaged))


class Gpu:
    """A GPU's stand-in that decodes on the CPU and records its requests."""

    type = "cuda"

    def __init__(self, monkeypatch, refuses=False):
        self.asked, self.copied = [], []

        def decode_jpegs(contents, mode, device):
            assert device is self
            self.asked.extend(contents)
            if refuses:
                raise RuntimeError("decode_jpegs_cuda, /a/b.cpp:3, no nvJPEG\nfrom here")
            return [codec.decode(content, mode) for content in contents]

        monkeypatch.setattr(images, "codec", lambda: codec._replace(decode_jpegs=decode_jpegs))
        to = torch.Tensor.to
        monkeypatch.setattr(
            torch.Tensor, "to", lambda image, where, *rest: self.copied.append(image) or image
            if where is self else to(image, where, *rest)
        )  # fmt: skip


@pytest.fixture
def threads():
    threads = Threads(most_kept=1)
    yield threads
    threads.close(wait=True)


def test_plain_jpegs_are_decoded_by_the_gpu_in_one_call_and_the_others_copied_to_it(monkeypatch, threads):
    gpu = Gpu(monkeypatch)
    contents = [encoded(photo(seed=i), "PNG" if i % 3 == 1 else "JPEG") for i in range(8)]
    samples = list(map(sample, contents))
    found = Image().decode(samples, gpu, threads)
    assert torch.equal(found, torch.stack([codec.decode(one, "RGB") for one in samples]))
    assert [id(one) for one in gpu.asked] == [id(samples[i]) for i in (0, 2, 3, 5, 6)] and len(gpu.copied) == 3


def test_images_that_the_gpu_refuses_are_decoded_on_the_cpu_with_a_warning(monkeypatch, threads):
    gpu, samples = Gpu(monkeypatch, refuses=True), [sample(encoded(photo(seed=i))) for i in range(4)]
    monkeypatch.setattr(gdsdata.io.engine, "_warned", set())
    with pytest.warns(RuntimeWarning, match="decoded on the CPU: no nvJPEG"):
        found = Image().decode(samples, gpu, threads)
    assert torch.equal(found, torch.stack([codec.decode(one, "RGB") for one in samples])) and len(gpu.copied) == 4
    samples[2][200:] = 0
    with pytest.raises(decoders.Undecodable) as raised:
        Image().decode(samples, gpu, threads)
    assert raised.value.sample == 2


# -------------------------------------------------------------------------------------------------------- on a real GPU


class Photos:
    """A format for tests: one file with an image, a number and bytes of each sample in turn."""

    FIELDS = (Field("jpg"), Field("number", np.dtype("<i8"), ()), Field("more"))

    def __init__(self, samples):
        self.lengths = np.array([[len(part) for part in one] for one in samples])

    def index(self, paths):
        status = os.stat(paths[0])
        begins = np.cumsum(self.lengths).reshape(self.lengths.shape) - self.lengths
        seen = np.array([status.st_size]), np.array([status.st_mtime_ns])
        return FieldIndex(paths, *seen, np.array([0, len(begins)]), self.FIELDS, Extents.of(begins, self.lengths))


def photos_on(device, folder, contents, decode=None, **arguments):
    samples = [(one, i.to_bytes(8, "little"), bytes([i]) * (i % 7)) for i, one in enumerate(contents)]
    (folder / "photos").write_bytes(b"".join(part for one in samples for part in one))
    decoders_of = {"jpg": decode} if decode else None
    return GDSDataset(
        folder / "photos",
        8,
        Photos(samples),
        shuffle=False,
        device=device,
        **grouped({"decode": decoders_of, **arguments}),
    )


def test_fields_beside_an_image_come_as_they_are(tmp_path):
    contents = [encoded(photo(seed=i)) for i in range(20)]
    batches = list(photos_on("cpu", tmp_path, contents, "image"))
    assert [list(batch) for batch in batches] == [["jpg", "number", "more"]] * 3
    assert torch.cat([batch["number"] for batch in batches]).tolist() == list(range(20))
    more = [one.tolist() for batch in batches for one in batch["more"].as_list()]
    assert more == [[i] * (i % 7) for i in range(20)]


def test_only_what_is_decoded_is_read_to_the_host(tmp_path):
    class Counting:
        """The CPU's engine, in place of a GPU's and of the host's."""

        def __init__(self):
            self.lengths = []
            self.mark = real.mark

        def begin_read(self, files, file, begin_bytes, length_bytes, *others):
            self.lengths.append(sorted(length_bytes.tolist()))
            return real.begin_read(files, file, begin_bytes, length_bytes, *others)

    real = engine.shared_engine(EngineOptions(), CPU)
    samples = [(b"image" * (i + 2), i.to_bytes(8, "little"), b"more") for i in range(6)]
    (tmp_path / "photos").write_bytes(b"".join(part for one in samples for part in one))
    index, device, host = Photos(samples).index([str(tmp_path / "photos")]), Counting(), Counting()
    settings = BatchSettings(CPU, EngineOptions(), prefetch=2, ragged="list", decode={"jpg": decoders.keep_encoded})
    batches = FieldReader(index, settings, device, engine.file_table(index), host)
    batches.plan(np.arange(6), np.array([4, 2]), np.arange(2))
    found = [batches.next() for _ in range(2)]
    bytes_read = sum(batches.statistics()["bytes"].values())
    batches.close()
    assert [one.numpy().tobytes() for batch in found for one in batch["jpg"]] == [one[0] for one in samples]
    assert torch.cat([batch["number"] for batch in found]).tolist() == list(range(6))
    assert all(one.numpy().tobytes() == b"more" for batch in found for one in batch["more"])
    assert sorted(host.lengths) == [[10, 15, 20, 25], [30, 35]]
    assert sorted(device.lengths) == [[4, 4, 4, 4, 8, 8, 8, 8], [4, 4, 8, 8]]
    assert bytes_read == sum(len(part) for one in samples for part in one)


GPU_DECODERS = {"as they are": Image(), "resized": Image(resize=(24, 32)), "gray": Image(mode="GRAY")}


@pytest.mark.gpu
@pytest.mark.parametrize("decoder", GPU_DECODERS.values(), ids=GPU_DECODERS)
def test_images_and_their_fields_come_to_a_gpu_as_to_the_cpu(tmp_path, decoder):
    contents = [encoded(photo(seed=i), "PNG" if i % 5 == 0 else "JPEG", progressive=i % 3 == 0) for i in range(40)]
    on_cpu = list(photos_on("cpu", tmp_path, contents, decoder))
    on_gpu = list(photos_on("cuda", tmp_path, contents, decoder))
    for expected, found in zip(on_cpu, on_gpu, strict=True):
        assert found["jpg"].device.type == found["number"].device.type == found["more"].values.device.type == "cuda"
        assert found["jpg"].shape == expected["jpg"].shape and found["jpg"].dtype == torch.uint8
        assert (found["jpg"].cpu().float() - expected["jpg"].float()).abs().mean() < 4
        assert torch.equal(found["number"].cpu(), expected["number"])
        assert torch.equal(found["more"].values.cpu(), expected["more"].values)


@pytest.mark.gpu
def test_images_of_several_sizes_are_a_list_on_a_gpu(tmp_path):
    contents = [encoded(photo(20 + i, 30)) for i in range(8)]
    (batch,) = photos_on("cuda", tmp_path, contents, "image")
    assert [tuple(one.shape) for one in batch["jpg"]] == [(3, 20 + i, 30) for i in range(8)]
    assert all(one.device.type == "cuda" for one in batch["jpg"])


@pytest.mark.gpu
def test_a_busy_stream_finds_each_image_as_it_came(tmp_path):
    """If decoders' streams overwrote memory that a kernel still reads, this would fail."""
    contents = [encoded(photo(200, 300, seed=i)) for i in range(96)]
    expected = [batch["jpg"].cpu() for batch in photos_on("cuda", tmp_path, contents, "image")]
    found = []
    for batch in photos_on("cuda", tmp_path, contents, "image", prefetch=2):
        torch.cuda._sleep(20_000_000)
        found.append(batch["jpg"].clone())
        del batch
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


@pytest.mark.gpu
def test_a_damaged_image_is_named_on_a_gpu_too(tmp_path):
    contents = [encoded(photo(seed=i)) for i in range(8)]
    contents[3] = contents[3][:400]
    with pytest.raises(CorruptData, match="field 'jpg' of 400 bytes"):
        list(photos_on("cuda", tmp_path, contents, "image"))


@pytest.mark.gpu
def test_encoded_bytes_lie_in_pinned_memory_that_is_used_again(tmp_path):
    contents = [encoded(photo(seed=i % 4)) for i in range(160)]
    places = set()
    for i, batch in enumerate(photos_on("cuda", tmp_path, contents, "encoded", prefetch=2)):
        assert all(one.is_pinned() for one in batch["jpg"]) and batch["number"].device.type == "cuda"
        assert [one.numpy().tobytes() for one in batch["jpg"]] == contents[8 * i : 8 * i + 8]
        places.add(batch["jpg"][0].data_ptr())
    assert len(places) < 10, "20 batches, of which at most 4 were there at once"
