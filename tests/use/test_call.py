"""An ensemble that is called as a pipeline of diffusers, and such a pipeline, against plain loops and each other."""

from __future__ import annotations

import io
import threading
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from artifact_files import refused
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from rich.console import Console
from saved_ensembles import kept as kept
from saved_ensembles import load, saved
from tiny_runs import settings

from ddm_lightning.cli.parser import main
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.flow.timesteps import sampling_times
from ddm_lightning.networks.dit import RouterDiT
from ddm_lightning.use.export import export_diffusers
from ddm_lightning.use.rows import text_condition

SHIFT = 1.5
"""Of the saved experts."""
NOISE = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(5))
FULL = {"strategy": "full", "solver": "euler", "num_inference_steps": 5, "output_type": "latent"}


@pytest.fixture(scope="module")
def ensemble(kept):
    return load(kept)


@pytest.fixture(scope="module")
def exported(ensemble, tmp_path_factory):
    out = tmp_path_factory.mktemp("diffusers") / "three"
    export_diffusers(ensemble.manifest, out)
    return out


def opened(out, **options):
    return DiffusionPipeline.from_pretrained(out, custom_pipeline=str(out), trust_remote_code=True, **options)


@pytest.fixture(scope="module")
def pipeline(exported):
    return opened(exported)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def shown(images):
    return [image.tobytes() for image in images]


def watch(*_):
    """A callback that changes nothing."""


GUESSES = {
    "ensemble(…)": (lambda one: one("cat").images, 1),
    "prompt": (lambda one: one(prompt="cat")[0], 1),
    "num_images_per_prompt": (lambda one: one("cat", num_images_per_prompt=3).images, 3),
    "num_inference_steps": (lambda one: one.sample("cat", num=1, num_inference_steps=2), 1),
    "generator": (lambda one: one("cat", generator=seeded(1)).images, 1),
    "negative_prompt": (lambda one: one("cat", negative_prompt="dog", guidance_scale=3.0).images, 1),
    "output_type": (lambda one: one("cat", output_type="np").images, 1),
    "callback_on_step_end": (lambda one: one("cat", callback_on_step_end=watch).images, 1),
    "batch_size": (lambda one: one(["cat", "dog"], batch_size=1).images, 2),
    "scheduler": (lambda one: one("cat", scheduler="ddim"), "no setting 'scheduler'; did you mean 'solver'? known: "),
    "lists of seeds": (lambda one: one.sample("cat", num=2, seed=[1, 2]), 2),
    "dtype": (lambda one: [load(one.folder, dtype=torch.bfloat16).dtype], torch.bfloat16),
    "torch_dtype": (lambda one: [load(one.folder, torch_dtype=torch.float16).dtype], torch.float16),
    "device_map": (lambda one: load(one.folder, device_map="auto"), "did you mean 'device'? known: folder_or_url, "),
    ".experts": (lambda one: one.experts, 3),
    ".router": (lambda one: [one.router], RouterDiT),
    ".dtype": (lambda one: [one.dtype], torch.float32),
    "from_pretrained(ARTIFACT)": (lambda one: load(one.folder / "expert-1").sample("cat", num=1), 1),
}


@pytest.mark.parametrize("guess", GUESSES)
def test_the_first_guesses_of_a_user_of_diffusers(kept, ensemble, guess):
    """Those that failed once."""
    call, expected = GUESSES[guess]
    ensemble.folder = kept
    if isinstance(expected, str):
        refused(lambda: call(ensemble), expected)
        return

    found = call(ensemble)
    if isinstance(expected, int):
        assert len(found) == expected
    else:
        assert found == [expected] or isinstance(found[0], expected)


@pytest.mark.parametrize("more", [{}, {"strategy": "bayes"}], ids=str)
def test_call_pipeline_and_command_make_the_same_images(kept, ensemble, pipeline, tmp_path, more):
    prompts = ["cat", "dog", "cat"]
    options = [word for name, value in more.items() for word in (f"--{name}", value)]
    for prompt in prompts:
        options += ["--prompt", prompt]

    out = tmp_path / "grid.png"
    assert main(["sample", "-c", str(kept), *options, "--num", "2", "--seed", "7", "--out", str(out)]) == 0
    singles = sorted(out.with_suffix("").glob("*.png"))
    expected = [Image.open(path).tobytes() for path in singles]

    assert len(expected) == len({*expected}) == 6
    for found in (
        ensemble(prompts, seed=7, num_images_per_prompt=2, **more).images,
        pipeline(prompts, seed=7, num_images_per_prompt=2, **more).images,
        ensemble.sample(prompts, seed=7, num=2, **more),
        ensemble(prompts, seed=np.int64(7), num_images_per_prompt=2, batch_size=6, **more)[0],
    ):
        assert shown(found) == expected


@pytest.mark.parametrize(
    "more",
    [{}, {"strategy": "bayes"}, {"negative_prompt": "bird", "guidance_scale": 3.0}, {"seed": [*range(8)]}],
    ids=str,
)
def test_the_size_of_batches_changes_no_image(ensemble, more):
    found = []
    for batch_size in (1, 3, 8):
        given = {"seed": 5, "num_images_per_prompt": 4, "batch_size": batch_size, **more}
        found.append(shown(ensemble(["cat", "dog"], **given).images))

    assert found[0] == found[1] == found[2] and len({*found[0]}) == 8


def test_each_image_may_have_a_seed_of_its_own(ensemble):
    """Which is the first of its prompt with that seed."""
    alone = {}
    for prompt in ("cat", "dog"):
        for seed in (1, 2):
            (alone[prompt, seed],) = shown(ensemble(prompt, seed=seed).images)

    together = shown(ensemble(["cat", "dog"], num_images_per_prompt=2, seed=np.array([1, 2, 2, 1])).images)
    assert together == [alone["cat", 1], alone["cat", 2], alone["dog", 2], alone["dog", 1]]
    assert shown(ensemble.sample("cat", num=2, seed=(2, 1))) == [alone["cat", 2], alone["cat", 1]]
    assert shown(ensemble("cat").images) != shown(ensemble("cat").images), "without a seed"


def test_threads_that_share_the_networks_change_no_image_of_one_another(ensemble):
    expected = shown(ensemble("cat", num_images_per_prompt=2, seed=1).images)
    others = []

    def interrupt(_, step, *__):
        if not step:
            others.append(threading.Thread(target=ensemble, args=["dog"], kwargs={"precision": "bf16-mixed"}))
            others[0].start()
            others[0].join(0.5)  # it waits for this call

    made = ensemble("cat", num_images_per_prompt=2, seed=1, callback_on_step_end=interrupt).images
    others[0].join()

    assert shown(made) == expected


def test_output_types_are_those_of_diffusers(ensemble):
    images = {kind: ensemble(["cat", "dog"], seed=1, output_type=kind).images for kind in ("pil", "np", "pt", "latent")}
    processor = VaeImageProcessor()
    expected = {"np": processor.pil_to_numpy(images["pil"])}
    expected["pt"] = processor.numpy_to_pt(expected["np"])

    assert images["np"].dtype == np.float32 and np.array_equal(images["np"], expected["np"])
    assert images["pt"].dtype == torch.float32 and torch.equal(images["pt"], expected["pt"])
    rounded = processor.postprocess(images["latent"].clone(), "np")  # its own decoder of pixels
    assert np.abs(rounded - images["np"]).max() <= 0.5 / 255 + 1e-6
    (same,) = ensemble(["cat", "dog"], seed=1, return_dict=False)
    assert shown(same) == shown(images["pil"])


def looped(ensemble, x, prompts, steps=range(5), negative=None, scale=1.0, after=lambda _step, _t, x: x):
    """Euler's method with the exact mixture of the experts."""
    condition = text_condition(prompts, ensemble.meta)
    other = negative and text_condition(negative, ensemble.meta)
    times = sampling_times(5, SHIFT).tolist()
    for step, (t, s) in enumerate([*pairwise(times)][steps.start :]):
        ts = torch.full((len(x),), t)
        velocity = ensemble.field.velocity(x, ts, condition, guidance_scale=scale, negative=other)
        x = after(step, s, x + (s - t) * velocity)

    return x


def test_callbacks_see_and_change_each_step_of_a_plain_loop(ensemble, pipeline):
    seen = []
    expected = []

    def change(owner, step, t, tensors):
        seen.append((step, t, tensors["latents"].clone()))
        assert owner in (ensemble, pipeline.ensemble)
        if step == 1:
            return {"latents": tensors["latents"].double() / 2}
        return tensors if step == 2 else None

    def halved(step, t, x):
        expected.append((step, t, x.clone()))
        return x / 2 if step == 1 else x

    prompts = ["cat", "dog"]
    x_0 = looped(ensemble, NOISE, prompts, after=halved)
    for one in (ensemble, pipeline):
        seen.clear()
        found = one(prompts, latents=NOISE, callback_on_step_end=change, **FULL).images
        torch.testing.assert_close(found, x_0, rtol=0, atol=1e-5)
        assert [step for step, _, _ in seen] == [0, 1, 2, 3, 4], "one batch of all images"
        for (_, t, x), (_, reached, x_s) in zip(seen, expected, strict=True):
            assert t == reached
            torch.testing.assert_close(x, x_s, rtol=0, atol=1e-5)

    plain = looped(ensemble, NOISE, prompts)
    for more in ({}, {"callback_on_step_end": watch}):
        found = ensemble(prompts, latents=NOISE.numpy(), **more, **FULL).images
        torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("negative", ["bird", ["bird", "tree"], ["", "tree"]], ids=str)
def test_a_negative_prompt_takes_the_place_of_the_null_condition(ensemble, negative):
    """Also beside one that is empty."""
    prompts = ["cat", "dog"]
    found = ensemble(prompts, negative_prompt=negative, guidance_scale=3.0, latents=NOISE, **FULL).images
    if negative[0] == "":
        texts = None, ["tree"]
        parts = zip(prompts, NOISE.split(1), texts, strict=True)
        expected = torch.cat([looped(ensemble, x, [prompt], negative=text, scale=3.0) for prompt, x, text in parts])
    else:
        texts = [negative] * 2 if isinstance(negative, str) else negative
        expected = looped(ensemble, NOISE, prompts, negative=texts, scale=3.0)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    without = ensemble(prompts, guidance_scale=3.0, latents=NOISE, **FULL).images
    assert (found[1] - without[1]).abs().max() > 1e-2
    empty = ensemble(prompts, negative_prompt=["", ""], guidance_scale=3.0, latents=NOISE, **FULL).images
    assert torch.equal(empty, without)


def test_a_negative_prompt_reaches_the_router(ensemble):
    mixture = {"guidance": "mixture", "guidance_scale": 3.0, "latents": NOISE[:1], **FULL}
    field = ensemble.field
    times = sampling_times(5, SHIFT).tolist()
    condition, negative = (text_condition([text], ensemble.meta) for text in ("cat", "bird"))
    x = NOISE[:1]
    for t, s in pairwise(times):
        ts = torch.tensor([t])
        weights, null_weights = (field.probabilities(x, ts, text) for text in (condition, negative))
        of_cat = field.velocity(x, ts, condition, weights=weights)
        of_bird = field.velocity(x, ts, negative, weights=null_weights)
        x = x + (s - t) * (of_bird + 3 * (of_cat - of_bird))

    torch.testing.assert_close(ensemble("cat", negative_prompt="bird", **mixture).images, x, rtol=0, atol=1e-5)


def picture(seed, height=4, width=4):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_it_starts_from_an_image(ensemble):
    """From the noisy image at 60 % of the steps, against a plain loop."""
    pixels = np.stack([picture(1), picture(2)])
    x_0 = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1
    t = sampling_times(5, SHIFT)[2].item()
    prompts = ["cat", "dog"]
    expected = looped(ensemble, (1 - t) * x_0 + t * NOISE, prompts, steps=range(2, 5))

    images = [Image.fromarray(one) for one in pixels]
    tensors = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    for given in (images, pixels, pixels.astype(np.float64) / 255, tensors, tensors / 255, [*tensors], tuple(pixels)):
        found = ensemble(prompts, image=given, strength=0.6, latents=NOISE, **FULL).images
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    one = ensemble(prompts, image=images[0], strength=0.6, latents=NOISE, **FULL).images
    assert torch.equal(one[0], found[0]) and not torch.equal(one[1], found[1])
    assert torch.equal(ensemble(prompts, image=images, seed=1, strength=0.8, **FULL)[0], both(ensemble, images))
    whole = ensemble(prompts, image=images, strength=1, seed=1, **FULL)[0]
    assert torch.equal(whole, ensemble(prompts, seed=1, **FULL)[0])


def both(ensemble, images):
    """With diffusers' strength."""
    return ensemble(["cat", "dog"], image=images, seed=1, **FULL)[0]


def test_images_to_start_from_are_stretched_and_on_white(ensemble):
    def found(image):
        return ensemble.encode(image)

    large = picture(3, 9, 6)
    expected = Image.fromarray(large).resize((4, 4), Image.Resampling.LANCZOS)
    assert torch.equal(found(large), found(expected))

    clear = Image.fromarray(picture(4)).convert("RGBA")
    clear.putalpha(0)
    assert (found(clear) == 1).all(), "white"
    turned = Image.fromarray(picture(5))
    turned.getexif()[0x0112] = 3
    buffer = io.BytesIO()
    turned.save(buffer, "PNG", exif=turned.getexif())
    upright = Image.open(io.BytesIO(buffer.getvalue()))
    assert torch.equal(found(upright), found(turned.rotate(180)))
    assert upright.getexif()[0x0112] == 3, "the caller's image stays"


def test_latents_to_start_from_are_the_mean_of_the_posterior(tmp_path, monkeypatch):
    class Halves:
        """Two by two pixels in four channels, the sides halved; a posterior."""

        stores = "posterior"

        def encode(self, images):
            side = images.shape[1] // 2
            four = images.reshape(-1, side, 2, side, 6)[..., :2].transpose(0, 2, 4, 1, 3).reshape(-1, 4, side, side)
            return np.concatenate([four, np.full_like(four, 9)], 1).astype(np.float32)

        def decode(self, x_0):
            return np.zeros((len(x_0), 2 * x_0.shape[2], 2 * x_0.shape[3], 3), np.uint8)

    normalisation = {"scale": [1.0, 2.0, 3.0, 4.0], "shift": [5.0, 6.0, 7.0, 8.0]}
    one = load(saved(tmp_path, (100,), normalisation=normalisation))
    monkeypatch.setattr("ddm_lightning.use.loaded.built_encoder", lambda *_: Halves())
    one.manifest.metas["expert-0"] = replace(one.meta, x_shape=(4, 4, 4))
    pixels = picture(6, 8, 8)
    corners = [pixels[row::2, :, channel].reshape(4, 4, 2)[..., 0] for row in (0, 1) for channel in (0, 1)]
    expected = np.stack(corners).astype(np.float32)
    expected = (expected - np.array([5, 6, 7, 8])[:, None, None]) * np.array([1, 2, 3, 4])[:, None, None]

    assert one.image_size == (8, 8)
    assert np.array_equal(one.encode(pixels)[0].numpy(), expected)


IMAGE = "image: give images of Pillow, arrays [h w 3] or tensors [3 h w], of uint8 or numbers from 0 to 1"
CALLBACK = "callback_on_step_end: give a function; its only tensor inputs are ['latents']"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *(({"prompt": nothing}, "give prompts (strings) or classes") for nothing in (123, [], [None], b"a", ["a", 1])),
        ({"class_labels": 3}, "give prompts (strings) or classes"),
        ({"prompt": " "}, "a prompt is empty"),
        ({"prompt": None, "class_labels": 3}, "is conditioned on 'text', not on class; leave classes out"),
        ({"negative_prompt": "dog"}, "negative_prompt: has no effect without guidance; give a guidance_scale"),
        ({"negative_prompt": ["a", "b"], "guidance_scale": 2.0}, "negative_prompt: 2 for 1 prompts; give one, or one"),
        ({"negative_prompt": 5, "guidance_scale": 2.0}, "give prompts (strings) or classes"),
        ({"num_images_per_prompt": 0}, "'sample.num_per_prompt' = 0: must be at least 1"),
        ({"num_inference_steps": "ten"}, "'sample.num_steps': must be a whole number, is 'ten'"),
        ({"num_inference_step": 3}, "no setting 'num_inference_step'; did you mean 'num_inference_steps'? known: "),
        ({"prompts": "dog"}, "no setting 'prompts'; did you mean 'prompt'? known: "),
        ({"resident_experts": 2}, "no setting 'resident_experts'; known: "),
        ({"source": "a"}, "no setting 'source'; known: "),
        ({"seed": [1, 2]}, "2 seeds for 1 images: give one, or one per image"),
        ({"seed": 1.5}, "key 'seed': must be a whole number, is 1.5"),
        ({"seed": [1, "a"]}, "key 'seed[1]': must be a whole number, is 'a'"),
        ({"seed": [-1, 1]}, "key 'seed[0]'"),
        ({"generator": 5}, "generator = 5: give a torch.Generator or one per image, or numbers as seed"),
        ({"generator": [np.random.default_rng(0)]}, "give a torch.Generator or one per image"),
        ({"generator": [seeded(1)] * 3}, "3 seeds for 1 images: give one, or one per image"),
        (
            {"latents": NOISE},
            "latents has shape [2, 3, 4, 4]; give [1, 3, 4, 4], one per image; height and width change it",
        ),
        ({"latents": "x"}, "latents = 'x': give a tensor [images c h w] of noise"),
        ({"image": 5}, IMAGE),
        ({"image": "cat.png"}, IMAGE),
        ({"image": np.zeros((4, 4))}, IMAGE),
        ({"image": np.zeros((4, 4, 4), np.uint8)}, IMAGE),
        ({"image": torch.full((3, 4, 4), 2.0)}, IMAGE),
        ({"image": torch.full((3, 4, 4), np.nan)}, IMAGE),
        ({"image": torch.full((3, 4, 4), -0.5)}, IMAGE),
        ({"image": []}, IMAGE),
        ({"image": Image.new("F", (4, 4))}, "floating-point numbers of unknown range"),
        ({"image": [picture(1)] * 2}, "image: 2 for 1 prompts; give one, or one per prompt"),
        ({"image": picture(1), "strength": 0}, "strength = 0: give a number above 0"),
        ({"image": picture(1), "strength": 1.5}, "strength = 1.5: give a number above 0 and at most 1"),
        ({"image": picture(1), "strength": "a"}, "key 'strength': must be a finite number"),
        ({"height": 512, "width": 4}, "512 x 4 pixels: three makes images of 4 x 4 pixels; leave height and width out"),
        ({"width": "4"}, "key 'sample.size' = ['4', '4']: must be [height, width] in pixels"),
        ({"output_type": "jpeg"}, "key 'output_type' = 'jpeg': must be one of pil, np, pt, latent"),
        ({"batch_size": 0}, "key 'batch_size' = 0: must be at least 1"),
        ({"callback_on_step_end": 5}, CALLBACK),
        ({"callback_on_step_end": watch, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}, CALLBACK),
        ({"callback_on_step_end": lambda *_: {"latents": NOISE}}, "a tensor of shape [1, 3, 4, 4]}"),
    ],
    ids=lambda value: (
        ", ".join(value) if isinstance(value, dict) else value[:60]
    ),  # no addresses, which differ by process
)
def test_what_a_call_cannot_take_is_refused_in_one_line(ensemble, pipeline, given, words):
    given = {"prompt": "cat", **given}
    state = torch.get_rng_state()
    line = refused(lambda: ensemble(**given), words)
    torch.set_rng_state(state)
    assert refused(lambda: pipeline(**given), words) == line


@pytest.mark.parametrize(("kind", "size", "more"), [("none", 0, {}), ("class", 3, {"class_labels": [1]})])
def test_negative_prompts_need_texts(tmp_path, kind, size, more):
    one = load(saved(tmp_path, (100,), condition=ConditionSpec(kind, size), caption_encoder=None))
    words = f"is conditioned on {kind!r}, not on text; leave negative_prompt out"
    refused(lambda: one(negative_prompt="cat", **more), words)
    assert len(one(negative_prompt="", **more).images) == 1


def test_ensemble_and_pipeline_move_to_a_device_and_a_dtype(kept, exported, ensemble):
    precisions = {torch.float32: "32-true", torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}
    expected = {}
    for dtype, precision in precisions.items():
        expected[dtype] = shown(ensemble(["cat", "dog"], seed=3, precision=precision).images)

    assert len({*map(str, expected.values())}) == 3
    for one in (load(kept), opened(exported)):
        assert one.device.type == "cpu" and one.dtype == torch.float32
        for dtype in (torch.bfloat16, torch.float32, torch.float16):
            assert one.to(dtype) is one and one.dtype == dtype
            assert shown(one(["cat", "dog"], seed=3).images) == expected[dtype]

        assert one.to("cpu", torch.bfloat16).dtype == torch.bfloat16
        assert one.to(torch.float32, torch.device("cpu")).dtype == torch.float32
        assert one.to(device="cpu", dtype=torch.float16).dtype == torch.float16
        refused(lambda one=one: one.to("cpu", torch.int8), "dtype torch.int8: must be one of torch.float32, ")
        refused(lambda one=one: one.to("cuda:99"), "device cuda:99: torch cannot use it")
        assert one.device.type == "cpu" and one.dtype == torch.float16

    moved = opened(exported).to("meta").ensemble
    assert {part.device.type for expert in moved.experts for part in expert.parameters()} == {"meta"}
    refused(lambda: load(kept, torch_dtype="auto"), "dtype auto: must be one of torch.float32, ")


def test_diffusers_hands_its_options_of_loading_on(exported, ensemble):
    loaded = opened(exported, torch_dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16 and opened(exported, device_map="cpu").device.type == "cpu"
    assert [type(one) for one in loaded.ensemble.experts] == [type(one) for one in ensemble.experts]
    refused(lambda: opened(exported, device_map="balanced"), "device_map: give a device such as 'cuda'")
    refused(lambda: opened(exported, torch_dtype=torch.int8), "dtype torch.int8: must be one of")
    assert loaded("cat").images
    index = exported / "model_index.json"
    old = index.read_text()
    try:
        index.write_text('{"_class_name": ["pipeline", "DecentralizedPipeline"]}')  # of earlier exports
        assert opened(exported).dtype == torch.float32
    finally:
        index.write_text(old)


def test_a_member_of_a_run_is_an_ensemble_of_one(finished_run, tmp_path):
    out = tmp_path / "grid.png"
    command = ["sample", *settings(finished_run), "sample.member=expert-1", "--prompt", "red disc", "--out", str(out)]
    assert main([*command, "--num", "2", "--seed", "3"]) == 0
    expected = [Image.open(path).tobytes() for path in sorted(out.with_suffix("").glob("*.png"))]

    member = finished_run / "members" / "expert-1"
    for place in (member, member / "artifact"):
        one = load(place)
        assert [*one.manifest.folders] == ["expert-1"]
        assert shown(one.sample("red disc", num=2, seed=3)) == expected

    refused(lambda: load(finished_run / "members" / "router"), "is a router; give an expert or the monolith")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_progress_bar_can_be_turned_off(ensemble, pipeline, monkeypatch, capsys):
    def printed(one, **options):
        one.set_progress_bar_config(**options)
        file = Terminal()
        with monkeypatch.context() as patched:
            patched.setattr("ddm_lightning.core.formatting.Console", lambda **_: Console(file=file, width=80))
            one("cat")

        return file.getvalue()

    for one in (ensemble, pipeline):
        assert "images" in printed(one, leave=True) and "1/1" in printed(one)
        assert printed(one, disable=True) == ""
        one.set_progress_bar_config()
        capsys.readouterr()
        one("cat")
        assert capsys.readouterr() == ("", ""), "no terminal"
