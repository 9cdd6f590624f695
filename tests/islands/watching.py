"""Looking at members that train: waiting, weights, steps, refusals."""

import time

from ddm_lightning.cli.parser import main


def wait_for(condition, seconds=120):
    """Look again and again, and leave most of the processor to what is waited for."""
    begin = time.monotonic()
    asked = begin
    while not condition():
        now = time.monotonic()
        assert now < begin + seconds
        time.sleep(max(0.05, 4 * (now - asked)))
        asked = time.monotonic()


def weights(run, member="expert-0"):
    return (run / "members" / member / "artifact/model.safetensors").read_bytes()


def steps_of(run):
    """Steps that the first expert has taken, here and in the places that it came from."""
    lines = (run / "members/expert-0/sample_ids.txt").read_text().splitlines()
    return [int(line.partition(":")[0]) for line in lines]


def launch(capsys, run, *more):
    """What ``launch`` says of each member, without handles."""
    capsys.readouterr()
    assert main(["launch", *run, *more]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    return [line.partition(" (")[0] for line in lines]


def refused(capsys, *arguments):
    """The error line of a command."""
    capsys.readouterr()
    assert main([*arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")
