"""PNGs that say how they were made, and the command that makes them again."""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from saved_ensembles import kept as kept
from saved_ensembles import saved

from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.parser import main
from ddm_lightning.core.files import sha256_file
from ddm_lightning.ensemble.velocity import Cost, Ensemble
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.use import samples

ODD = 'a "red", apple:\n赤い 🍎\\'
SETTINGS = ("--strategy", "bayes", "--seed", "5", "sample.num_steps=3", "sample.strategy_params.router_prior=false")
SETTINGS += ("sample.guidance_scale=1.5", "sample.guidance_interval=[0.1,0.8]")


def chunks(path):
    """Type, keyword and text of each text chunk of a PNG, by the format's own description."""
    data = path.read_bytes()
    found = []
    place = 8
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind = data[place + 4 : place + 8].decode()
        body = data[place + 8 : place + 8 + size]
        if kind == "tEXt":
            keyword, text = body.split(b"\0", 1)
            found.append((kind, keyword.decode(), text.decode("latin-1")))
        elif kind == "iTXt":
            keyword, rest = body.split(b"\0", 1)
            assert rest[:2] == b"\0\0"
            *_, text = rest[2:].split(b"\0", 2)
            found.append((kind, keyword.decode(), text.decode()))

        place += 12 + size

    return found


def singles(grid):
    return sorted(grid.with_suffix("").iterdir())


def pixels(paths):
    return [Image.open(path).tobytes() for path in paths]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No chart of weights and no counting of FLOPs: half the time of a tiny call."""
    monkeypatch.setattr(samples, "weights_chart", lambda *_: Image.new("RGB", (1, 1)))
    monkeypatch.setattr(Ensemble, "cost", lambda *_: Cost(1.0, 1.0))


def sampled(called, folder, grid, *more):
    called("sample", "-c", folder, "--out", grid, *more)
    return singles(grid)


def test_an_image_says_how_it_was_made(kept, called, tmp_path):
    grid = tmp_path / "grid.png"
    images = sampled(called, kept, grid, "--prompt", ODD, "--prompt", "café", "--num", "2", *SETTINGS)

    for number, (path, labels) in enumerate(
        [(grid, [ODD, "café"]), *zip(images, [[ODD]] * 2 + [["café"]] * 2, strict=True)]
    ):
        ((kind, key, text),) = chunks(path)
        assert (kind, key) == ("tEXt", "ddm_lightning")
        recipe = json.loads(text)
        sample = recipe["sample"]
        assert (sample["prompts"], sample["num_per_prompt"]) == (labels, 1 if number else 2)
        assert (sample["strategy_params"], sample["guidance_interval"]) == ({"router_prior": False}, [0.1, 0.8])
        assert recipe["index"] == (None, 0, 1, 0, 1)[number]


def test_the_ensemble_is_known_by_its_members_and_priors(kept, first):
    members = {
        name: sha256_file(kept / name / "member.json") for name in ("expert-0", "expert-1", "expert-2", "router")
    }
    content = {"members": members, "places": {"expert-0": 0, "expert-1": 1, "expert-2": 2}, "priors": [0.2, 0.3, 0.5]}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))

    assert json.loads(chunks(first)[0][2])["ensemble"] == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("kind", ["text", "class", "none"])
def test_images_and_grids_are_made_again(kind, kept, called, tmp_path):
    folder = kept
    rows = ("--prompt", ODD, "--prompt", "cat", "--prompt", ODD)
    more = SETTINGS
    if kind != "text":
        condition = ConditionSpec(kind, 3 if kind == "class" else 0)
        folder = saved(tmp_path, condition=condition, caption_encoder=None)
        rows = ("--class", "2", "--class", "0", "--class", "2") if kind == "class" else ()
        more = SETTINGS[:-2]

    images = sampled(called, folder, tmp_path / "grid.png", *rows, "--num", "2", *more)
    assert len({*pixels(images)}) == len(images) == (2 if kind == "none" else 6)

    again = sampled(called, folder, tmp_path / "again.png", "--from", tmp_path / "grid.png")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in images]
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "grid.png").read_bytes()
    (one,) = sampled(called, folder, tmp_path / "one.png", "--from", images[-1])
    assert one.read_bytes() == images[-1].read_bytes()
    (one,) = sampled(called, folder, tmp_path / "two.png", "--from", tmp_path / "one.png")
    assert one.read_bytes() == images[-1].read_bytes()


@pytest.mark.parametrize(
    "given",
    [
        ("--prompt", "dog", "--seed", "6", "sample.strategy_params.router_prior=true"),
        ("--num", "3", "sample.num_steps=2"),
        ("--strategy", "full"),
        ("sample.strategy=full",),
    ],
)
def test_options_beside_it_win(given, kept, first, called, tmp_path):
    changed = sampled(called, kept, tmp_path / "changed.png", "--from", first, *given)

    options = {"--prompt": "cat", "--num": "1", "--seed": "5", "--strategy": "bayes"}
    settings = list(SETTINGS[4:])
    if "full" in given[-1]:  # whose params and solver are others
        options["--strategy"] = "full"
        settings = ["sample.solver=ancestral", *(text for text in settings if "params" not in text)]
    for name, value in zip(given[::2], given[1::2], strict=False):
        if name in options:
            options[name] = value

    settings += [text for text in given if "=" in text]
    flat = [word for pair in options.items() for word in pair]
    expected = sampled(called, kept, tmp_path / "same.png", *flat, *settings)
    assert pixels(changed) == pixels(expected)
    assert pixels(changed)[0] != pixels([first])[0]


@pytest.fixture
def start(tmp_path):
    """An image to start from."""
    path = tmp_path / "start.png"
    numbers = np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3) * 2
    Image.fromarray(numbers).save(path)
    return path


def test_negative_prompts_and_images_to_start_from_are_those_of_the_call(kept, called, refuse, start, tmp_path):
    given = ("--prompt", "cat", "--num", "2", "--negative-prompt", "dog,\nfox", "--image", start, "--strength", "0.7")
    images = sampled(called, kept, tmp_path / "grid.png", *given, "--seed", "5", "sample.guidance_scale=2")

    ensemble = DecentralizedEnsemble.from_pretrained(kept)
    expected = ensemble(
        "cat",
        negative_prompt="dog,\nfox",
        num_images_per_prompt=2,
        image=Image.open(start),
        strength=0.7,
        seed=5,
        guidance_scale=2.0,
    ).images
    assert pixels(images) == [image.tobytes() for image in expected]
    ((*_, text),) = chunks(images[1])
    recipe = json.loads(text)
    assert (recipe["negative_prompt"], recipe["strength"], recipe["image"]) == ("dog,\nfox", 0.7, sha256_file(start))

    again = ("sample", "-c", kept, "--out", tmp_path / "again.png", "--from", images[1])
    assert (
        refuse(*again) == f"{images[1]}: started from an image, SHA-256 {recipe['image'][:12]}…; give it with --image"
    )
    called(*again, "--image", start)
    (one,) = singles(tmp_path / "again.png")
    assert one.read_bytes() == images[1].read_bytes()
    for more in (["--negative-prompt", ""], ["--strength", "0.4"]):
        called(*again, "--image", start, *more)
        assert pixels(singles(tmp_path / "again.png")) != pixels(images[1:])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--strength", "0.5"], "--strength: has no effect without --image"),
        (["--image", "start.png", "--strength", "0"], "strength = 0.0: give a number above 0"),
        (["--image", "start.png", "--strength", "nan"], "strength = nan"),
        (["--image", "none.png"], "none.png: cannot be read as an image"),
        (["--image", "cut.png"], "cut.png: cannot be read as an image"),
        (["--image", "page.eps"], "page.eps: cannot be read as an image"),
        (["--negative-prompt", "dog"], "negative_prompt: has no effect without guidance"),
    ],
)
def test_an_option_that_cannot_be_is_refused(given, words, kept, refuse, start, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("cut.png").write_bytes(start.read_bytes()[:50])
    Image.new("RGB", (4, 4)).save("page.eps")
    assert refuse("sample", "-c", kept, "--prompt", "cat", "--out", "grid.png", *given).startswith(words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.png", "page.eps", "start.png"]


def png(path, **texts):
    info = PngInfo()
    for keyword, text in texts.items():
        info.add_text(keyword, text)

    Image.new("RGB", (4, 4)).save(path, pnginfo=info)
    return path


def with_chunk(path, kind, body):
    """The PNG with one more chunk before its pixels."""
    data = path.read_bytes()
    place = data.index(b"IDAT") - 4
    chunk = struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    path.write_bytes(data[:place] + chunk + data[place:])
    return path


ABSENT = "does not say how it was made"
UNREADABLE = "cannot be read as an image"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda path: path, UNREADABLE),  # missing
        (lambda path: path.mkdir() or path, UNREADABLE),
        (lambda path: path.write_bytes(b"no image") and path, UNREADABLE),
        (lambda path: Image.new("RGB", (4, 4)).save(path, format="JPEG") or path, ABSENT),
        (png, ABSENT),
        (lambda path: png(path, parameters="cat\nSteps: 3"), ABSENT),  # of a web UI
        (lambda path: png(path, ddm_lightning="{"), ABSENT),
        (lambda path: png(path, ddm_lightning="[" * 10**5), "nested too deep"),
        (lambda path: png(path, ddm_lightning="[3]"), "must be a section of keys, is [3]"),
        (
            lambda path: with_chunk(png(path), b"zTXt", b"ddm_lightning\0\0" + zlib.compress(bytes(65 << 20))),
            UNREADABLE,
        ),
        (lambda path: path.write_bytes(png(path, ddm_lightning="{}").read_bytes()[:60]) and path, UNREADABLE),
        (lambda path: path.write_bytes(png(path).read_bytes()[:16] + b"\xff" * 8) and path, UNREADABLE),
    ],
)
def test_a_file_without_a_recipe_is_refused(made, words, kept, refuse, tmp_path):
    path = made(tmp_path / "image.png")
    line = refuse("sample", "-c", kept, "--from", path, "--out", tmp_path / "grid.png")
    assert line.startswith(f"{path}: ") and words in line and "; give a PNG" in line
    assert not (tmp_path / "grid.png").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"ensemble": "0" * 64},
            "made with 'three', member None, SHA-256 000000000000…, and this is 'three', SHA-256 ",
        ),
        ({"ensemble": "0"}, "'ensemble' = '0': must be 64"),
        ({"name": "a\nb"}, "'name' = 'a\\nb': must be a string of one line"),
        ({"seed": 1 << 63}, "key 'seed': must be a whole number"),
        ({"seed": None}, "key 'seed'"),
        ({"index": -1}, "'index' = -1"),
        ({"classes": [0]}, "is conditioned on 'text', not on class"),
        ({"classes": ["/etc/passwd"]}, "'classes[0]'"),
        ({"run_dir": "/tmp"}, "unknown key 'run_dir'"),
        ({"sample": []}, "'sample'"),
        ({"sample": {"num_steps": 0}}, "'sample.num_steps' = 0"),
        ({"sample": {"strategy": "os.system"}}, "'sample.strategy' = 'os.system'"),
        ({"sample": {"solver": "../euler"}}, "'sample.solver' = '../euler'"),
        ({"sample": {"strategy_params": {"router_prior": "${oc.env:HOME}"}}}, "key 'sample.strategy'"),
        ({"sample": {"prompts": [""]}}, "a prompt is empty"),
        ({"sample": {"prompts": ["\udc80"]}}, "not UTF-8"),
        ({"sample": {"prompts": 3}}, "'sample.prompts'"),
        ({"sample": {"num_per_prompt": 10**12}}, "lower --num"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(changes, words, kept, first, refuse, tmp_path):
    recipe = json.loads(chunks(first)[0][2])
    sample = changes.get("sample")
    if isinstance(sample, dict):
        changes = {"sample": recipe["sample"] | sample}

    path = png(tmp_path / "image.png", ddm_lightning=json.dumps(recipe | changes))
    line = refuse("sample", "-c", kept, "--from", path, "--out", tmp_path / "grid.png")
    assert words in line and "/home" not in line
    assert not (tmp_path / "grid.png").exists()


@pytest.fixture(scope="module")
def first(kept, tmp_path_factory):
    """A single image."""
    grid = tmp_path_factory.mktemp("first") / "grid.png"
    assert main(["sample", "-c", str(kept), "--out", str(grid), "--prompt", "cat", "--num", "1", *SETTINGS]) == 0
    (image,) = singles(grid)
    return image


def test_names_of_files_show_the_prompt(kept, called, tmp_path):
    prompts = {
        "red apple": "red-apple",
        "/../..\\x": "x",
        "赤い りんご": "赤い-りんご",
        "🍎": "🍎",
        "👩\u200d🚀!": "👩\u200d🚀",
        "...": "",
        "नमस्ते दुनिया": "नमस्ते-दुनिया",
        "很" * 200: "很" * 40,
        "a\u202egnp.exe\x9b\n\t": "a-gnp-exe",
        "x" * 300: "x" * 40,
        "été_2": "été_2",
    }
    rows = [word for prompt in [*prompts, "🍎"] for word in ("--prompt", prompt)]
    images = sampled(called, kept, tmp_path / "grid.png", *rows, "--num", "1", "sample.num_steps=1")

    expected = [f"{row:03d}-{words}-0000.png" for row, words in enumerate([*prompts.values(), "🍎"])]
    assert [image.name for image in images] == expected
    sampled(called, kept, tmp_path / "grid.png", "--prompt", "cat", "--num", "1", "sample.num_steps=1")
    assert [image.name for image in singles(tmp_path / "grid.png")] == ["000-cat-0000.png"]
