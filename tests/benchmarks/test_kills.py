import json
import signal

import kills
import pytest

from ddm_lightning.core.errors import UserError


@pytest.mark.parametrize(("number", "most"), [("-1", 800), ("0", 800), ("801", 800)])
def test_more_stops_than_fit_are_refused_before_anything_is_trained(number, most):
    with pytest.raises(UserError, match=f"--kills {number}: must be from 1 to {most}"):
        kills.main(["--kills", number])


def test_stops_are_random_in_order_and_of_every_kind():
    found = kills.random_stops(20, 1000, [kills.KILL, kills.TERMINATE, kills.FULL_DISK], seed=0)
    steps = [stop.at_step for stop in found if stop.at_step is not None]
    assert len(found) == 20 and steps == sorted(steps) and len(set(steps)) == len(steps) == 18
    assert {stop.kind for stop in found} == {kills.KILL, kills.TERMINATE, kills.FULL_DISK}
    assert all(stop.kind == kills.KILL and stop.delay <= 6 for stop in found if stop.at_step is None)
    assert found == kills.random_stops(20, 1000, [kills.KILL, kills.TERMINATE, kills.FULL_DISK], seed=0)
    assert found != kills.random_stops(20, 1000, [kills.KILL, kills.TERMINATE, kills.FULL_DISK], seed=1)


@pytest.mark.parametrize(
    ("code", "said", "what"),
    [
        (0, "", "done"),
        (-signal.SIGKILL, "", kills.KILL),
        (130, "stopped at step 7", kills.TERMINATE),
        (2, "error: /x: is full; free some space, then run the same command again", kills.FULL_DISK),
    ],
)
def test_how_a_training_ended(code, said, what):
    assert kills._reason(code, said) == what


def test_any_other_end_is_an_error():
    with pytest.raises(UserError, match="ended with code 1: Traceback"):
        kills._reason(1, "Traceback")


@pytest.mark.slow
@pytest.mark.long
def test_quick_ends_in_the_same_weights(tmp_path):
    kills.main(["--quick", "--json", str(tmp_path / "kills.json")])
    figures = json.loads((tmp_path / "kills.json").read_text())["figures"]
    assert figures["num_stops"] == kills.QUICK_KILLS
    assert figures["same_weights"] == figures["same_averages"] == 1
    assert figures["unreadable_checkpoints"] == 0 < figures["checkpoints_read"]
    assert 0 < figures["goodput_steps"] <= 1
