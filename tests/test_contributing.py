"""The code in docs/plugins.md, run as it is printed."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ddm_lightning.core.registry import METRICS
from ddm_lightning.prepare.records import BrokenSample, Source

TEXT = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")


def block(line):
    """The indented block that contains this line."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", TEXT, re.MULTILINE)
    (found,) = [block for block in blocks if f"    {line}\n" in block]
    return textwrap.dedent(found)


def run(line):
    """Names that the block defines."""
    defined = {"__name__": "printed_in_the_guide"}
    exec(block(line), defined)
    return defined


@pytest.mark.parametrize("line", ["class TwoLayers(nn.Module):", "class Sharpened(Strategy):"])
def test_the_example_keeps_its_contract(line):
    run(line)["test_contract"]()


def test_the_source_reads_what_it_says(tmp_path):
    images = np.zeros((3, 4, 4, 3), np.uint8)
    images[1:] = 7
    np.savez(tmp_path / "a.npz", images=images, captions=np.array(["one", "two", "three"]))
    example = run("class Pairs:")
    example["test_contract"](tmp_path)

    source = example["Pairs"](tmp_path)
    (part,) = source.parts()
    black, *others = source.read(part)

    assert isinstance(source, Source)
    assert isinstance(black, BrokenSample)
    assert [(record.key, record.caption) for record in others] == [("a.npz/1", "two"), ("a.npz/2", "three")]


def test_the_metric_is_found_by_name(monkeypatch):
    monkeypatch.setitem(METRICS._built_in, "colour-gap", run("class ColourGap(Metric):")["ColourGap"])
    metric = METRICS.build("colour-gap", {})
    for level in (0, 6):  # black and grey images, mean 3
        metric.update(np.full((2, 4, 4, 3), level, np.uint8), real=True)
    metric.update(np.full((3, 4, 4, 3), [3, 6, 7], np.uint8), real=False)
    assert float(metric.compute()) == 5


def test_the_strategy_takes_the_params_of_the_example():
    settings = yaml.safe_load(block("# an experiment file"))["sample"]
    strategy = run("class Sharpened(Strategy):")["Sharpened"](**settings["strategy_params"])
    weights = strategy.weights(torch.tensor([[0.25, 0.75]]))
    torch.testing.assert_close(weights, torch.tensor([[1 / 28, 27 / 28]]))


def test_each_example_in_python_is_run_here():
    assert re.findall(r"^    class (\w+)", TEXT, re.MULTILINE) == ["TwoLayers", "Pairs", "Sharpened", "ColourGap"]
