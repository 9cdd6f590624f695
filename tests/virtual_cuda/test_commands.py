"""Every command on a virtual CUDA device: no device is mixed, and the host waits only where a reason is given."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

pytestmark = pytest.mark.slow

COLUMNS = ("upload", "shards.datamodule:transfer_batch_to_device")
ROUTED = ("wait", "ensemble.velocity:rows_by_expert")
POSITIONS = ("blocking upload", "networks.dit:table")
IN_A_THREAD = ("wait", "training.ema:_take_in")
TENTH = ("download", "training.ema:after_step")


def allow_list():
    """By command, kind and place: how many events may be, and per which units."""
    found = {}
    for group in yaml.safe_load(Path(__file__).with_name("allowed.yaml").read_text(encoding="utf-8")):
        for command in group.pop("commands").split():
            for kind, places in group.items():
                for place, text in places.items():
                    entry = re.fullmatch(r"(\d+) per ([a-z +]+); .{5,}", text)
                    assert entry is not None, f"{place}: {text!r} gives no bound with a reason"
                    assert (command, kind, place) not in found, f"{command}, {kind}, {place}: twice"
                    found[command, kind, place] = int(entry[1]), entry[2].split("+")

    return found


def test_the_host_waits_and_copies_only_where_a_reason_is_given(everything):
    allowed = allow_list()
    problems = []
    for ran in everything:
        for event, number in ran.counts.items():
            at_most, units = allowed.get((ran.name, *event), (0, []))
            limit = at_most * sum(ran.units[unit] for unit in units)
            if number > limit:
                problems.append(f"{number} x {': '.join(event)} ({limit} allowed) in {ran}")

    assert not problems, "\n".join(problems)


def test_every_entry_of_the_allow_list_still_matches(everything):
    seen = {(ran.name, *event) for ran in everything for event in ran.counts}
    unseen = [": ".join(entry) for entry in allow_list() if entry not in seen]

    assert not unseen, "\n".join(unseen)


def test_the_positions_of_each_shape_go_to_the_device_once(everything):
    """Those of two shapes; the square's go there with the weights."""
    (ran,) = (ran for ran in everything if ran.name == "fit" and any("buckets" in word for word in ran.argv))

    assert ran.counts[POSITIONS] == 2


def test_between_log_steps_a_training_step_copies_its_batch_and_waits_for_nothing(everything):
    members = set()
    for ran in everything:
        # The first step also brings constants to the device.
        for step in (step for step in ran.steps[1:] if not step.due):
            # An expert of a student's teacher is called with its rows alone, whose number the host must know.
            student = {ROUTED: 1} if "member=student" in ran.argv else {}
            averages = {TENTH: 33} if "island.ema=host" in ran.argv and step.number == 10 else {}
            own = step.counts - Counter({POSITIONS: 2, IN_A_THREAD: 1})
            assert own == {COLUMNS: 5, **student, **averages}, f"step {step.number} of {ran}"
            members |= {word for word in ran.argv if word.startswith("member=")}

    names = ("expert-0", "expert-1", "expert-2", "router", "monolith", "student")

    assert members == {f"member={name}" for name in names}


def test_a_stopped_training_resumes_on_the_device(everything):
    stopped, resumed = (ran for ran in everything if "member=expert-0" in ran.argv and ran.name == "fit")

    assert [step.number for step in stopped.steps] == [1, 2, 3, 4, 5, 6]
    assert [step.number for step in resumed.steps] == [7, 8, 9, 10, 11, 12]


def test_previews_of_a_training_do_not_fail(everything):
    """Their errors are lines: none of them is worth a training."""
    assert not [line for ran in everything for line in ran.output.splitlines() if re.search(r"step \d+: no ", line)]


def test_it_computes_what_a_cpu_computes(everything, run_dir):
    on_device, on_cpu = (np.asarray(Image.open(run_dir / f"{name}.png")) for name in ("gpu", "cpu"))

    assert on_cpu.std() > 10

    np.testing.assert_array_equal(on_device, on_cpu)


def test_networks_sample_in_bfloat16_unless_told_otherwise(everything):
    full = "torch.float32"
    half = "torch.bfloat16"
    for ran in everything:
        if ran.name in ("sample", "evaluate", "diagnose"):
            expected = {full} if "sample.precision=32-true" in ran.argv else {half}
            assert {*ran.notes} == expected, ran.argv
        if "member=student" in ran.argv:
            assert {*ran.notes} == {full, half}  # its own, and its teacher's


def test_a_training_names_its_attention_kernel(everything):
    lines = ["attention by torch's kernel" in ran.output for ran in everything if "member=expert-0" in ran.argv]
    assert lines[:2] == [True, True]
