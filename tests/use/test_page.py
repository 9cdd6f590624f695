"""The page of ``demo``: in a headless browser, through its API, and what it shows of other ensembles."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import httpx
import numpy as np
import pytest
from artifact_files import edit
from gradio_client import Client
from gradio_client.exceptions import AppError
from PIL import Image
from playwright.sync_api import Error, expect, sync_playwright
from saved_ensembles import saved
from tiny_runs import ROOT, copy_run, settings, start

from ddm_lightning import DecentralizedEnsemble
from ddm_lightning.cli.parser import main
from ddm_lightning.core import registry
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.prepare.prepared import example_captions

pytestmark = pytest.mark.slow
expect.set_options(timeout=60_000)
STEPS = 3
SHAPES = "Height x width"


@contextlib.contextmanager
def served(process):
    """Address of the page that ``process`` serves until the block ends."""
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"page: (http://127\.0\.0\.1:\d+) \(Ctrl-C ends it\)\n", line)
        assert found, line or process.communicate(timeout=60)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert process.returncode == 0 and "Traceback" not in err, err


CREDIT = 'Some ![](http://192.0.2.1/a.png) <img src="http://192.0.2.2/b.png"> painters'


@pytest.fixture(scope="module")
def address(finished_run, tmp_path_factory):
    """The page of an ensemble whose credit names images of other servers."""
    run = copy_run(finished_run, tmp_path_factory.mktemp("page") / "run")
    edit(run / "prepared" / "manifest.json", attribution=CREDIT)
    with served(start("demo", run, f"sample.num_steps={STEPS}", "--port", "0")) as address:
        yield address


def connected(address):
    return contextlib.closing(Client(address, verbose=False, analytics_enabled=False))


@pytest.fixture(scope="module")
def client(address):
    with connected(address) as client:
        yield client


@pytest.fixture
def browser():
    of_npm = Path(sys.prefix) / "browser" / "chromium"
    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=of_npm if of_npm.exists() else None)
        except Error:
            pytest.skip("no Chromium: `make install` reached neither Playwright's host nor npm")

        with contextlib.closing(chromium):
            yield chromium


def put(page, label, value):
    """Fill in a field; again if Gradio, which is still loading, puts its own value back."""
    field = page.get_by_label(label, exact=True)
    kept = 0
    for _ in range(30):
        if field.input_value() != value:
            field.fill(value)
            field.blur()
            kept = 0

        page.wait_for_timeout(500)
        kept += 1
        if kept > 1 and field.input_value() == value:
            return

    raise AssertionError(f"{label} does not keep {value[:50]!r}")


def generate(page):
    page.get_by_role("button", name="Generate").click()


def pixels(page, which, folder):
    """What the browser shows of an image of the page."""
    shown = page.locator("img").nth(which)
    expect(shown).to_be_visible()
    shown.screenshot(path=folder / "shown.png")
    return opened(folder / "shown.png")


def opened(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def test_a_prompt_gives_images_and_heat_maps(browser, address, tmp_path):
    page = browser.new_page(viewport={"width": 1400, "height": 1000})
    hosts = set()
    page.on("request", lambda request: hosts.add(request.url.split("/")[2]) if request.url[:4] == "http" else None)
    page.goto(address)
    put(page, "Prompt", "a cross")
    put(page, "number input for Images", "2")  # last: were it put back, four images would appear
    generate(page)
    expect(page.get_by_text("active experts")).to_have_count(2)
    expect(page.locator("img")).to_have_count(6)  # two images and a heat map on each side
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert pixels(page, 0, tmp_path).std() > 5
    yellow = (np.abs(pixels(page, 2, tmp_path) - (253, 231, 36)).max(2) < 8).sum()
    assert yellow > 500, "the heat map of top-1 shows weights of 1"

    for k in range(2):
        put(page, f"number input for expert-{k}", "0")

    generate(page)
    expect(page.get_by_text("every expert is switched off; leave one on")).to_be_visible()
    expect(page.locator("img")).to_have_count(0)  # none of the earlier prompt
    assert page.get_by_text("Error", exact=True).count() == 1
    put(page, "Seed", "-1")
    generate(page)
    expect(page.get_by_text(re.compile(r"'seed' = -1: must be from 0"))).to_be_visible()
    assert page.get_by_text("Traceback").count() == 0
    expect(page.get_by_text(CREDIT)).to_be_visible()
    assert hosts == {address.removeprefix("http://")}, "everything comes from the page itself"


def test_an_empty_prompt_leaves_the_images_and_a_click_on_a_caption_fills_it_in(browser, address):
    page = browser.new_page()
    page.goto(address)
    put(page, "Prompt", "a cross")
    put(page, "number input for Images", "1")
    generate(page)
    expect(page.locator("img")).to_have_count(4)

    put(page, "Prompt", " ")
    generate(page)
    expect(page.get_by_text("the prompt has 0 characters; describe an image in 1 to 2,000")).to_be_visible()
    page.wait_for_timeout(1000)
    expect(page.locator("img")).to_have_count(4)

    expect(page.get_by_text("Captions of the training images work best", exact=True)).to_be_visible()
    caption = page.locator("button.gallery-item").nth(1)
    expect(caption).to_have_text(re.compile(r"^\w+ (disc|square|cross|ring)$"))
    caption.click()
    expect(page.get_by_label("Prompt", exact=True)).to_have_value(caption.inner_text().strip())


def test_a_run_without_the_parts_of_its_data_has_no_captions(finished_run, tmp_path):
    shutil.copytree(finished_run / "prepared", tmp_path / "prepared")
    assert 1 < len(example_captions(tmp_path / "prepared", 24)) <= 12  # colours and shapes
    for gone in ("groups", "."):
        shutil.rmtree(tmp_path / "prepared" / gone)
        assert example_captions(tmp_path / "prepared", 24) == []


@pytest.mark.parametrize(
    ("method", "path", "host", "status"),
    [
        ("GET", "config", "evil.example", 421),
        ("GET", "config", "127.0.0.1.evil.example", 421),
        ("GET", "config", "localhost:1", 200),
        ("GET", "config", "192.168.3.4", 200),
        ("GET", "config", "[::1]:1", 200),
        ("GET", "monitoring", "localhost", 404),
        ("GET", "docs", "localhost", 404),
        ("GET", "gradio_api/file=http://127.0.0.1/", "localhost", 404),
        ("GET", "gradio_api/file=/etc/hostname", "localhost", 403),
        ("POST", "gradio_api/upload", "localhost", 404),
        ("POST", "gradio_api/run/generate", "localhost", 404),
    ],
)
def test_what_the_page_does_not_need_is_closed(address, method, path, host, status):
    answer = httpx.request(method, f"{address}/{path}", headers={"Host": host}, timeout=120)
    assert answer.status_code == status
    assert status == 200 or len(answer.text.strip().splitlines()) == 1


def ask(client, **changes):
    asked = {"prompt": "red disc", "strategy": "full", "num": 2, "num_steps": STEPS, "guidance": 1.5, "seed": 3}
    factors = changes.pop("factors", (1, 1))
    images, cost, weights = client.predict(*(asked | changes).values(), *factors, api_name="/generate")
    return [opened(one["image"]) for one in images], cost, opened(weights)


def test_the_page_shows_the_images_of_the_python_api(client, finished_run):
    ensemble = DecentralizedEnsemble.from_pretrained(finished_run, "cpu")
    options = {"num": 2, "seed": 3, "num_steps": STEPS, "guidance_scale": 1.5}
    for strategy, factors in (("full", (1, 1)), ("bayes", (1, 1)), ("full", (0, 1))):
        shown, cost, _ = ask(client, strategy=strategy, factors=factors)
        expected = ensemble.sample("red disc", strategy=strategy, factors=factors, **options)
        for ours, theirs in zip(expected, shown, strict=True):
            larger = ours.resize(theirs.shape[1::-1], Image.Resampling.LANCZOS)
            assert len(theirs) >= 96 and np.abs(theirs - np.asarray(larger)).max() <= 2

        assert (", 1.00 active experts" in cost) == (factors == (0, 1)) or strategy == "bayes"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": "x" * 2001}, "the prompt has 2,001 characters; describe an image in 1 to 2,000"),
        ({"num_steps": 5000}, "5000 is greater than maximum"),
        ({"seed": None}, "a number is empty"),
        ({"strategy": "best"}, "best is not in the list"),
        ({"seed": 1.5}, "'seed': must be a whole number, is 1.5"),
        ({"num": 1.5}, "must be a whole number, is 1.5"),
        ({"factors": (0, 0)}, "every expert is switched off"),
    ],
)
def test_bad_input_is_told_in_one_line(client, changes, words):
    with pytest.raises(AppError, match=words) as told:
        ask(client, **changes)

    assert "\n" not in str(told.value)


def test_one_unconditional_expert_has_neither_a_prompt_nor_switches(tmp_path):
    folder = saved(tmp_path, (100,), condition=ConditionSpec("none", 0), caption_encoder=None)
    command = [sys.executable, "-m", "ddm_lightning", "demo", "-c", str(folder), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with served(subprocess.Popen(command, cwd=ROOT, **pipes)) as address, connected(address) as client:
        labels = [part["props"].get("label") for part in client.config["components"]]
        assert [label for label in labels if label] == ["Images", "Steps", "Seed", "Strategy A", "Strategy B"]
        cleared = [len(one["outputs"]) for one in client.config["dependencies"] if one["trigger_only_on_failure"]]
        assert sorted(cleared) == [3, 6], "side B after its own error, both sides after one of A"
        images, cost, weights = client.predict("full", 1, 2, 0, api_name="/generate")
        assert len(images) == 1 and "1.00 active experts" in cost and len(opened(weights)) < 200


def test_an_ensemble_of_several_shapes_offers_them(tmp_path):
    folder = saved(tmp_path, (100,), buckets=[Bucket(h, w, (3, h, w)) for h, w in ((2, 8), (4, 4), (8, 2))])
    command = [sys.executable, "-m", "ddm_lightning", "demo", "-c", str(folder), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with served(subprocess.Popen(command, cwd=ROOT, **pipes)) as address, connected(address) as client:
        (shape,) = [part["props"] for part in client.config["components"] if part["props"].get("label") == SHAPES]
        assert (shape["value"], [name for name, _ in shape["choices"]]) == ("4x4", ["2x8", "4x4", "8x2"])
        images, _, _ = client.predict("cat", "full", 2, 2, 1.0, 0, "8x2", api_name="/generate")
        assert [opened(one["image"]).shape[:2] for one in images] == [(192, 48)] * 2


def test_what_demo_refuses(finished_run, tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        assert main(["demo", *arguments]) == 2
        return capsys.readouterr().err

    run = settings(finished_run)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(*settings(tmp_path / "no-run"), "--port", port)  # told before anything is loaded

    assert line.startswith(f"error: --host 127.0.0.1 --port {port}: ") and "give another --port or --host" in line
    assert "--port 99999: must be from 0 to 65535" in refused(*run, "--port", "99999")
    assert "give another --port or --host" in refused(*run, "--host", "192.0.2.1")  # nobody's

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(registry, "distribution", missing)
    assert (
        refused(*run) == "error: demo needs the package 'gradio'; install it with: pip install 'ddm_lightning[page]'\n"
    )
