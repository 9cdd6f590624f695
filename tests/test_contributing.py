"""The code in CONTRIBUTING.md, run as it is printed."""

import shutil
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from shards.mds import WARNINGS
from training.short_fits import fit, weights

from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.prepare.records import Broken, Record, Source

pytestmark = WARNINGS
TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")


def block(first_line):
    """The indented block that begins with this line."""
    lines = TEXT.splitlines()
    start = lines.index(f"    {first_line}")
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    return textwrap.dedent("\n".join(lines[start:end]))


def run(first_line):
    """What the block defines."""
    defined = {"__name__": "printed_in_the_guide"}
    exec(block(first_line), defined)
    return defined


def test_the_expert_keeps_its_contract():
    run("import torch")["test_contract"]()


@pytest.mark.slow
def test_the_expert_trained_twice_from_one_seed_has_the_same_weights(tiny_prepared, tmp_path, monkeypatch):
    """Whatever is left in the memory that it is built in."""
    experiment = yaml.safe_load(block("# an experiment file"))
    network = experiment["expert"]["network"]
    monkeypatch.setitem(EXPERTS._built_in, network["name"], run("import torch")["TwoLayers"])
    empty, handed_over = torch.empty, []
    for left in (0.0, 1e4):

        def dirty(*size, left=left, **settings):
            found = empty(*size, **settings)
            return found.detach().fill_(left) if found.is_floating_point() else found

        shutil.copytree(tiny_prepared, tmp_path / str(left) / "prepared")
        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty", dirty)
            assert fit(tmp_path / str(left), f"expert.network={network}") == 0
        handed_over.append(weights(tmp_path / str(left)))
    assert handed_over[0] == handed_over[1]


def test_the_source_reads_what_it_says(tmp_path):
    images = np.zeros((3, 4, 4, 3), np.uint8)
    images[1:] = 7
    np.savez(tmp_path / "a.npz", images=images, captions=np.array(["one", "two", "three"]))
    source = run("from pathlib import Path")["Pairs"](tmp_path)
    assert isinstance(source, Source)
    (part,) = source.parts()
    black, *others = source.read(part)
    assert isinstance(black, Broken)
    assert [(record.key, record.caption) for record in others if isinstance(record, Record)] == [
        ("a.npz/1", "two"),
        ("a.npz/2", "three"),
    ]


def test_each_example_in_python_is_run_here():
    """An indented block that defines a class is one; there are two."""
    classes = [line.split()[1] for line in TEXT.splitlines() if line.startswith("    class ")]
    assert classes == ["TwoLayers(nn.Module):", "Pairs:"]
