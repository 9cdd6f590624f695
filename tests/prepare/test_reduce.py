"""JPEGs decoded at a lower resolution: which ones, what stays of them, and what becomes of older folders."""

import io
import shutil

import numpy as np
import pytest
from PIL import Image
from prepare.listed import Listener, experiment_of, hashes, part_folder, plug_in

from ddm_lightning.config.experiment import ImagesConfig
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare import reading as reading_module
from ddm_lightning.prepare.plugins import Plugins, inputs_of_images
from ddm_lightning.prepare.reading import Reading, cropped, to_square
from ddm_lightning.prepare.records import BrokenSample, Part, Record
from ddm_lightning.prepare.sources.decode import decode, decode_reduced
from ddm_lightning.prepare.stages import prepare

ORIENTATION = 0x0112
KINDS = {
    "plain": {},
    "progressive": {"progressive": True},
    "fine-colours": {"subsampling": 0},
    "grey": {"mode": "L"},
    "cmyk": {"mode": "CMYK"},
    "on-its-side": {"turned": 6},
    "upside-down": {"turned": 3},
}


def scene(height, width):
    """Waves of all directions, down to some pixels, and an edge; nothing is symmetric."""
    y, x = np.mgrid[:height, :width].astype(float)
    waves = [np.sin(x / (5 + c) + y / (23 - c)) + np.sin(y / (7 + c) - x / 31) + (x > 0.3 * width) for c in range(3)]
    return np.clip(128 + 40 * np.stack(waves, -1), 0, 255).astype(np.uint8)


def jpeg(pixels, mode="RGB", turned=1, **options):
    image = Image.fromarray(pixels).convert(mode)
    exif = image.getexif()
    exif[ORIENTATION] = turned
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=95, exif=exif, **options)
    return buffer.getvalue()


def psnr(one, other):
    return 10 * np.log10(255**2 / np.square(one.astype(float) - other).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_jpeg_is_decoded_at_a_fraction_and_looks_the_same_once_resized(kind):
    size = (200, 328) if "turned" in KINDS[kind] else (203, 331)
    data = jpeg(scene(*size), **KINDS[kind])
    full = decode(data, "a")
    asked = []
    found = decode_reduced(data, "a", lambda size: asked.append(size) or (50, 50))
    assert asked == [full.shape[:2]] and found["full_size"] == full.shape[:2]
    # A quarter, rounded up.
    assert found["image"].shape[:2] == tuple(-(-side // 4) for side in full.shape[:2])
    box = (0, 0, full.shape[1] / 4, full.shape[0] / 4)
    small = Image.fromarray(found["image"]).resize((25, 25), box=box), Image.fromarray(full).resize((25, 25))
    assert psnr(*map(np.asarray, small)) > 40


@pytest.mark.parametrize(
    ("least", "factor"),
    [((101, 165), 2), ((102, 165), 1), ((101, 166), 1), ((1, 1), 8), ((203, 331), 1), ((999, 1), 1)],
)
def test_both_sides_keep_the_least_size(least, factor):
    data = jpeg(scene(203, 331))
    found = decode_reduced(data, "a", lambda _: least)
    assert found["image"].shape[:2] == (-(-203 // factor), -(-331 // factor))
    assert (found["full_size"] is None) == (factor == 1)
    if factor == 1:
        np.testing.assert_array_equal(found["image"], decode(data, "a"))


def test_other_formats_and_damaged_files_are_as_before():
    pixels = scene(64, 64)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    for data in (buffer.getvalue(), Image.fromarray(pixels)):
        found = decode_reduced(data, "a", lambda _: (8, 8))
        assert found["full_size"] is None
        np.testing.assert_array_equal(found["image"], pixels)

    turned = jpeg(scene(63, 64), turned=3)  # whose last row, cut short, would be the first
    assert decode_reduced(turned, "a", lambda _: (8, 8))["full_size"] is None
    cut = jpeg(pixels)[:-200]
    broken = decode_reduced(cut, "a", lambda _: (8, 8))
    assert isinstance(broken, BrokenSample) and broken == decode(cut, "a")


class Photos:
    """JPEGs of odd sizes, some of them on their sides."""

    packages, attribution, num_classes = (), "", 1
    least_size = None

    def __init__(self):
        self.parts_of = {}
        for number in range(24):
            size = (131 + number % 3, 197) if number % 2 else (203, 141 + number % 5)
            if number % 4 == 0:
                size = (136, 200)
            self.parts_of.setdefault(f"part-{number // 12}", {})[f"{number}"] = jpeg(
                scene(*size), turned=6 if number % 4 == 0 else 1
            )

    def parts(self):
        return [Part(name, "1", len(samples)) for name, samples in self.parts_of.items()]

    def read(self, part):
        for key, data in self.parts_of[part.name].items():
            yield Record(key, caption="a scene", label=0, **decode_reduced(data, key, self.least_size))


IMAGES = {
    "crop": {"size": 16},
    "pad": {"size": 16, "aspect": "pad"},
    "stretch": {"size": 16, "aspect": "stretch"},
    "buckets": {"size": 16, "buckets": [[12, 20], [16, 16], [20, 12]]},
}


def reading_of(source, images):
    experiment = experiment_of(
        source, images=images, filters={"image_width": "> 141"}, keep=["image_height", "crop_left"]
    )
    plugins = Plugins(experiment.prepare)
    reading = Reading((found for part in plugins.parts for found in plugins.read(part)), plugins)
    return reading, list(reading.chunks())


@pytest.mark.parametrize("images", IMAGES.values(), ids=IMAGES)
def test_sizes_filters_crops_and_buckets_are_those_of_the_whole_image(monkeypatch, images):
    source = plug_in(monkeypatch, SOURCES, Photos())
    reading, (chunk,) = reading_of(source, ImagesConfig(**images))
    whole, (expected,) = reading_of(source, ImagesConfig(**images, reduce=False))
    assert reading.filtered == whole.filtered and reading.filtered.total() > 0
    assert reading.buckets == whole.buckets and reading.cropped == whole.cropped
    for one, other in zip(chunk.records, expected.records, strict=True):
        assert one.values == other.values and other.full_size is None
        assert one.full_size == other.image.shape[:2] and one.image.size < other.image.size / 3
    aspect = images.get("aspect", "crop")
    for one, found, square in zip(expected.records, chunk.images, chunk.squares, strict=True):
        assert max(psnr(found, other) for other in parts_of(one.image, found.shape[:2], aspect)) > 40
        if "buckets" in images:
            (other,) = parts_of(one.image, square.shape[:2], "stretch")
            assert psnr(square, other) > 40


def parts_of(image, size, aspect, factor=4):
    """Resize parts of the full decode that whole pixels of the reduced one make: of a crop, those about its middle."""
    whole = Image.fromarray(image)
    full = np.array(image.shape[:2])
    ratio = full / size
    middle = full / 2
    if aspect == "crop":
        lengths = ratio.min() * np.array(size) // factor * factor
        firsts = (full - lengths) / 2 // factor * factor
        corners = [firsts + np.array([down, right]) for down in (0, factor) for right in (0, factor)]
    else:
        lengths = full // factor * factor
        corners = [np.zeros(2)]

    inner = size
    if aspect == "pad":
        inner = [round(length / ratio.max()) for length in full.tolist()]

    for top, left in corners:
        box = (left, top, left + lengths[1], top + lengths[0])
        if top + lengths[0] <= full[0] and left + lengths[1] <= full[1]:
            assert np.abs((top, left) + lengths / 2 - middle).max() <= factor
            sheet = Image.new("RGB", size[::-1], "white")
            place = [(side - own) // 2 for side, own in zip(size, inner, strict=True)]
            sheet.paste(whole.resize(inner[::-1], Image.Resampling.LANCZOS, box), place[::-1])
            yield np.asarray(sheet)


@pytest.mark.parametrize("has_lanczos", [True, False])
@pytest.mark.parametrize("size", [(20, 20), (24, 16), (47, 9)])
def test_a_reduced_image_is_resized_as_pillow_does(monkeypatch, has_lanczos, size):
    """By torch to the same or the next level: its weights have fewer bits. Earlier ones have no Lanczos."""
    monkeypatch.setattr(reading_module, "_HAS_LANCZOS", has_lanczos and reading_module._HAS_LANCZOS)
    image = np.random.default_rng(0).integers(0, 256, (97, 131, 3), np.uint8)
    full_size = image.shape[:2]
    if size[0] == size[1]:
        found = to_square(image, size[0], "stretch", full_size)
    else:
        found = cropped(image, size, full_size)

    left, top, width, height = {20: (0, 0, 131, 97), 24: (33, 0, 64, 97), 47: (56, 0, 18, 97)}[size[0]]
    part = Image.fromarray(image).crop((left, top, left + width, top + height))
    expected = np.asarray(part.resize(size[::-1], Image.Resampling.LANCZOS))
    assert found.shape == (*size, 3)
    assert np.abs(found.astype(int) - expected).max() <= has_lanczos


def test_images_below_twice_the_size_keep_their_bits_and_their_hash(monkeypatch):
    source = plug_in(monkeypatch, SOURCES, Photos())
    contents = {
        reading_of(source, ImagesConfig(size=64, reduce=reduce))[0].facts()["content"] for reduce in (True, False)
    }
    assert len(contents) == 1


def test_an_older_folder_stays_valid_and_is_completed_by_its_own_rule(tmp_path, monkeypatch):
    """The hash without the rule is that of releases that had none."""
    assert inputs_of_images(ImagesConfig(size=16, reduce=False)) == {"size": 16, "aspect": "crop"}
    assert inputs_of_images(ImagesConfig()) == {"size": None, "aspect": "crop"}
    source = plug_in(monkeypatch, SOURCES, Photos())
    older = experiment_of(source, images=ImagesConfig(size=16, reduce=False))
    newer = experiment_of(source, images=ImagesConfig(size=16))
    for experiment in (older, newer):
        experiment.prepare.partition.kind = "random"
    manifest = prepare(older, tmp_path / "run")
    before = hashes(tmp_path / "run" / "prepared" / "parts")
    listener = Listener()
    assert prepare(newer, tmp_path / "run", listener) == manifest
    assert listener.lines == [f"{tmp_path / 'run' / 'prepared'}: up to date"]

    shutil.rmtree(part_folder(tmp_path / "run", "part-1"))
    assert prepare(newer, tmp_path / "run") == manifest
    assert hashes(tmp_path / "run" / "prepared" / "parts") == before
    fresh = prepare(newer, tmp_path / "fresh")
    assert fresh.images == {**manifest.images, "reduce": "whole pixels"}
    columns = [np.load(part_folder(tmp_path / run, "part-1") / "x_0.npy") for run in ("run", "fresh")]
    assert 20 < psnr(*columns) < np.inf
