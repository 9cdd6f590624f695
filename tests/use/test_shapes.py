"""Images of several shapes from one ensemble: the call, the command, recipes, grids and the exported pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from artifact_files import refused
from diffusers import DiffusionPipeline
from PIL import Image
from saved_ensembles import kept as kept
from saved_ensembles import load, saved
from tiny_runs import TINY

from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.ensemble.changes import added
from ddm_lightning.ensemble.manifest import read_ensemble
from ddm_lightning.ensemble.velocity import Cost, Ensemble
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.timesteps import sampling_times
from ddm_lightning.use import samples
from ddm_lightning.use.export import export_diffusers
from ddm_lightning.use.rows import text_condition

WIDE, SQUARE, TALL = BUCKETS = tuple(Bucket(h, w, (3, h, w)) for h, w in ((2, 8), (4, 4), (8, 2)))
FULL = {"strategy": "full", "solver": "euler", "num_inference_steps": 5, "output_type": "latent", "seed": 3}


@pytest.fixture(scope="module")
def shaped(tmp_path_factory):
    """The ensemble ``kept``, trained on three shapes. Not to be changed."""
    return saved(tmp_path_factory.mktemp("shaped"), buckets=BUCKETS)


@pytest.fixture(scope="module")
def ensemble(shaped):
    return load(shaped)


def noise(seed, key, shape):
    """The square's as ever; other shapes are part of the key."""
    own = () if shape == (3, 4, 4) else shape
    return torch.randn(shape, generator=keyed_generator(seed, "x_1", *key, *own))


def opened(path):
    with Image.open(path) as image:
        image.load()
        return image


@pytest.fixture
def quick(monkeypatch):
    """No chart of weights and no counting of FLOPs: half the time of a tiny call."""
    monkeypatch.setattr(samples, "weights_chart", lambda *_: Image.new("RGB", (1, 1)))
    monkeypatch.setattr(Ensemble, "cost", lambda *_: Cost(1.0, 1.0))


def shown(images):
    return [image.tobytes() for image in images]


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda bucket: bucket.name)
def test_each_shape_is_a_plain_loop_from_its_own_noise(ensemble, bucket):
    found = ensemble(["cat", "dog"], height=bucket.height, width=bucket.width, **FULL).images

    x = torch.stack([noise(3, (prompt, 0), bucket.x_shape) for prompt in ("cat", "dog")])
    condition = text_condition(["cat", "dog"], ensemble.meta)
    for t, s in pairwise(sampling_times(5, 1.5).tolist()):
        x = x + (s - t) * ensemble.field.velocity(x, torch.full((2,), t), condition)

    torch.testing.assert_close(found, x, rtol=0, atol=1e-5)


def test_the_square_is_the_default_and_has_the_bits_of_an_ensemble_without_buckets(ensemble, kept, capsys):
    expected = load(kept)("cat", **FULL).images
    for size in ({}, {"height": 4, "width": 4}, {"height": 4}, {"width": np.int64(4)}):
        assert torch.equal(ensemble("cat", **size, **FULL).images, expected)

    assert torch.equal(load(kept)("cat", height=4, **FULL).images, expected)
    assert capsys.readouterr().err == ""


def test_without_a_square_the_default_is_the_bucket_nearest_to_it(tmp_path):
    buckets = (WIDE, Bucket(4, 6, (3, 4, 6)), TALL)
    assert load(saved(tmp_path, buckets=buckets))("cat", seed=1).images[0].size == (6, 4)


def test_of_several_squares_the_default_is_that_of_the_networks(ensemble):
    manifest = ensemble.manifest
    metas = {name: replace(meta, buckets=(*BUCKETS, Bucket(8, 8, (3, 8, 8)))) for name, meta in manifest.metas.items()}
    several = DecentralizedEnsemble(replace(manifest, metas=metas))
    assert several.bucket_of() == SQUARE


@pytest.mark.parametrize(("height", "width", "taken"), [(2, 6, "2x8"), (40, 44, "4x4"), (8, 1, "8x2"), (20, 80, "2x8")])
def test_another_aspect_takes_the_nearest_bucket_and_says_so(ensemble, capsys, height, width, taken):
    (image,) = ensemble("cat", height=height, width=width, seed=1).images

    assert f"{image.height}x{image.width}" == taken
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"note: {height} x {width} pixels: no such images in training, so they are {taken}; sample.exact=true takes "
        "the size as it is"
    )


def test_the_model_card_names_the_sizes_height_first(shaped, kept):
    words = "height x width in pixels: 2x8, 4x4, 8x2. Add, for example,\n`height=2, width=8`."

    assert words in (shaped / "README.md").read_text(encoding="utf-8")
    assert "pixels" not in (kept / "README.md").read_text(encoding="utf-8")


def test_exact_takes_the_size_as_it_is(ensemble, kept, capsys):
    for one in (ensemble, load(kept)):
        found = one("cat", height=6, width=10, exact=True, **FULL).images
        assert found.shape == (1, 3, 6, 10) and found.isfinite().all()

    assert one.cost.gflop > 0
    assert capsys.readouterr().err == ""


WAYS = [
    {"strategy": "full", "solver": "heun"},
    {"strategy": "top-1", "guidance_scale": 3.0},
    {"strategy": "bayes", "negative_prompt": "bird", "guidance_scale": 3.0, "guidance": "mixture"},
    {"strategy": "top-k", "solver": "midpoint"},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_size_of_batches_changes_no_image_of_another_shape(ensemble, way):
    found = []
    for batch_size in (1, 3, 8):
        given = {"seed": 5, "num_images_per_prompt": 4, "batch_size": batch_size, "height": 2, "width": 8, **way}
        found.append(shown(ensemble(["cat", "dog"], **given).images))

    assert found[0] == found[1] == found[2] and len({*found[0]}) == 8


def test_call_pipeline_and_command_make_the_same_images_of_each_size(ensemble, shaped, tmp_path, quick):
    export_diffusers(ensemble.manifest, tmp_path / "exported")
    place = str(tmp_path / "exported")
    pipeline = DiffusionPipeline.from_pretrained(place, custom_pipeline=place, trust_remote_code=True)
    expected = []
    for height, width in ((8, 2), (4, 4)):
        given = {"height": height, "width": width, "num_images_per_prompt": 2, "seed": 7}
        images = ensemble(["cat", "dog"], **given).images
        assert shown(pipeline(["cat", "dog"], **given).images) == shown(images)
        expected += images

    out = tmp_path / "grid.png"
    rows = ["--prompt", "cat", "--prompt", "dog", "--num", "2", "--seed", "7", "--size", "8x2", "--size", "4x4"]
    assert main(["sample", "-c", str(shaped), *rows, "--out", str(out), "--gif"]) == 0
    singles = sorted(out.with_suffix("").iterdir())

    assert [path.name for path in singles] == [
        f"{row:03d}-{prompt}-{index:04d}.png" for row, prompt in enumerate(["cat", "dog"] * 2) for index in (0, 1)
    ]
    assert [opened(path).size for path in singles] == [(2, 8)] * 4 + [(4, 4)] * 4
    assert shown(map(opened, singles)) == shown(expected) and len({*shown(expected)}) == 8
    assert opened(out.with_suffix(".gif")).format == "GIF"


def test_images_and_grids_of_any_size_are_made_again(shaped, tmp_path, quick):
    out = tmp_path / "grid.png"
    again = tmp_path / "again.png"
    given = ["--prompt", "cat", "--prompt", "dog", "--num", "2", "--size", "8x2", "--size", "3x3", "--size", "2x8"]
    assert main(["sample", "-c", str(shaped), *given, "--out", str(out), "sample.exact=false"]) == 0
    singles = sorted(out.with_suffix("").iterdir())

    for path in (out, singles[3], singles[-1]):
        assert main(["sample", "-c", str(shaped), "--from", str(path), "--out", str(again)]) == 0
        expected = singles if path == out else [path]
        assert [one.read_bytes() for one in sorted(again.with_suffix("").iterdir())] == [
            one.read_bytes() for one in expected
        ]

    recipes = [json.loads(opened(path).info["ddm_lightning"])["sample"]["size"] for path in (out, singles[3])]
    assert recipes == [[[8, 2], [3, 3], [2, 8]], [8, 2]]
    for other in (["--size", "2x8"], ["sample.size=[2,8]"]):
        assert main(["sample", "-c", str(shaped), "--from", str(singles[3]), "--out", str(again), *other]) == 0
        (one,) = again.with_suffix("").iterdir()
        assert one.read_bytes() == singles[-1].read_bytes()


@pytest.mark.parametrize(
    ("size", "given", "shape"),
    [((9, 30), {}, (2, 8)), ((9, 10), {}, (4, 4)), ((30, 9), {"height": 4, "width": 4}, (4, 4))],
)
def test_an_image_to_start_from_has_the_bucket_of_its_aspect_or_the_size_asked_for(ensemble, size, given, shape):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8))
    found = ensemble("cat", image=image, strength=0.6, **given, **FULL).images

    stretched = np.asarray(image.resize(shape[::-1], Image.Resampling.LANCZOS))
    x_0 = torch.from_numpy(stretched.copy()).permute(2, 0, 1)[None] / 127.5 - 1
    times = sampling_times(5, 1.5).tolist()[2:]
    x = (1 - times[0]) * x_0 + times[0] * noise(3, ("cat", 0), (3, *shape))
    for t, s in pairwise(times):
        x = x + (s - t) * ensemble.field.velocity(x, torch.tensor([t]), text_condition(["cat"], ensemble.meta))

    torch.testing.assert_close(found, x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"height": 0, "width": 0}, "key 'sample.size' = [0, 0]: must be [height, width] in pixels"),
        ({"height": 10_000}, "key 'sample.size' = [10000, 10000]: must be [height, width] in pixels"),
        ({"height": "2", "width": 8}, "key 'sample.size' = ['2', 8]: must be [height, width]"),
        ({"size": [2, 8]}, "no setting 'size'; did you mean 'height'? known: "),
        ({"use_resolution_binning": False}, "did you mean 'exact'? known: "),
        (
            {"height": 3, "width": 8, "exact": True},
            "3 x 8 pixels: patch_size = 2 must divide the 3x8 cells of a sample",
        ),
        ({"height": 2, "width": 8, "latents": torch.zeros(1, 3, 4, 4)}, "has shape [1, 3, 4, 4]; give [1, 3, 2, 8]"),
    ],
)
def test_sizes_that_cannot_be(ensemble, given, words):
    refused(lambda: ensemble("cat", **given), words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(
            (["--size", text], f"--size {text}: give height and width in pixels, such as 320x192")
            for text in ("320", "320x", "axb", "2x8x2")
        ),
        (["--size", "0x0"], "--size 0x0: key 'sample.size' = [[0, 0]]: must be [height, width] in pixels"),
        (["--size", "2x9999"], "--size 2x9999: key 'sample.size' = [[2, 9999]]: must be [height, width] in pixels"),
        (["--size", "2x8"], "2 x 8 pixels: three makes images of 4 x 4 pixels; leave"),
        (["--size", "2x7", "--exact"], "2 x 7 pixels: patch_size = 2 must divide"),
        (["sample.size=[2]"], "key 'sample.size' = [2]: must be [height, width] in pixels"),
    ],
)
def test_sizes_that_the_command_refuses(kept, given, words, tmp_path, capsys):
    assert main(["sample", "-c", str(kept), "--prompt", "cat", "--out", str(tmp_path / "grid.png"), *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and list(tmp_path.iterdir()) == []


def test_an_experiment_of_one_shape_is_refused_other_sizes_before_it_starts():
    for more in ("[[4,16],[8,8]]", "[8,16]"):
        words = "'sample.size'", "needs prepare.images.buckets, as all images are one square"
        refused(lambda more=more: load_experiment(TINY, ["prepare.images.size=8", f"sample.size={more}"]), *words)

    for more in ("[8,8]", "[[8,8]]", "null", "[8,16] sample.exact=true"):
        load_experiment(TINY, ["prepare.images.size=8", *f"sample.size={more}".split()])


def test_several_sizes_are_rows_of_a_grid_and_a_call_takes_the_first(ensemble, tmp_path, monkeypatch):
    ensemble = ensemble.with_settings(size=[[2, 8], [8, 2]], num_per_prompt=3)
    rows = {}
    draw = samples.labelled_grid
    monkeypatch.setattr(samples, "labelled_grid", lambda shown, *more, **_: rows.update(shown) or draw(shown, *more))
    samples.write_samples(ensemble, tmp_path / "grid.png", ["cat"])

    assert {label: [image.shape[:2] for image in images] for label, images in rows.items()} == {
        "cat, 2x8": [(2, 8)] * 3,
        "cat, 8x2": [(8, 2)] * 3,
    }
    alone = ensemble("cat", height=2, width=8, output_type="np", seed=3).images
    assert np.array_equal(ensemble("cat", output_type="np", seed=3).images, alone)
    assert alone.shape == (1, 2, 8, 3)


@pytest.mark.parametrize("buckets", [(), BUCKETS[:2]])
def test_members_of_other_buckets_are_no_ensemble(tmp_path, shaped, buckets):
    other = saved(tmp_path, buckets=buckets) / "expert-1"
    manifest = read_ensemble(shaped / "ensemble.json")
    refused(lambda: added(manifest, other, 10), "member.json: has another value of buckets than ")
