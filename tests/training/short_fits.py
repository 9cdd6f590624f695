"""An expert of twenty steps, for tests that look at what one training leaves."""

import shutil

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import TINY

from ddm_lightning.cli.parser import main

SHORT = (
    "expert.train.max_steps=20",
    "island.log_every_n_steps=5",
    "island.validate_every_n_steps=12",
    "island.checkpoint_every_n_steps=6",
    "island.keep_checkpoints=3",
)


def fit(run, *more, name="expert-0"):
    return main(["fit", "-c", str(TINY), f"run_dir={run}", f"member={name}", *SHORT, *more])


def trained(prepared, folder, *more):
    """A run in ``folder`` with shards of its own, whose first expert is finished."""
    run = folder / "run"
    shutil.copytree(prepared, run / "prepared")

    assert fit(run, *more) == 0

    return run


def member(run, *parts):
    return run.joinpath("members", "expert-0", *parts)


def weights(run):
    return member(run, "artifact", "model.safetensors").read_bytes()


def checkpoints(run):
    return sorted(path.name for path in member(run, "checkpoints").iterdir())


def events(run, name="expert-0"):
    """What TensorBoard shows of a member."""
    return EventAccumulator(str(run / "members" / name / "tensorboard")).Reload()


def groups(shown):
    """Names of curves and images by group, in the order in which TensorBoard shows the groups."""
    tags = [tag.partition("/") for kind in ("scalars", "images") for tag in shown.Tags()[kind]]
    return {group: {name for own, _, name in tags if own == group} for group in sorted({tag[0] for tag in tags})}
