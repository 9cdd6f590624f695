"""Time of a training that publishes its checkpoints, over one that does not, in turn.

An expert of 7.4 million parameters trains without and with ``remote`` on an S3 server on loopback, several times in
alternating order. Both write a checkpoint (118 MB) every 7.4 seconds; one publishes it. The expert of
``paris_8x.yaml`` publishes as many bytes per second: 9.7 GB (608 million parameters, 16 bytes each) every ten minutes,
16 MB/s.

``publish_over_plain`` is the median over rounds of the time from the first step to the last. ``cpu_publish_over_plain``
compares the processor time of the whole process, start included, which other processes disturb less. The store runs on
the same cores, although a user's would not.

    python benchmarks/publishing.py --json benchmarks/results/publishing.json
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

from common import LOGS_SAMPLES, MEMBER, REPOSITORY, Report, load, parse, parser, run
from faults_island import Training
from step_clock import Seconds, ratios

from ddm_lightning.islands.shared import publish_prepared
from ddm_lightning.members.run import Run
from ddm_lightning.prepare.stages import prepare

sys.path.append(str(REPOSITORY / "tests" / "shards"))
import servers  # type: ignore[import-not-found]  # of the tests

ROUNDS = 8
ARMS = ("plain", "publishing")
MINUTES = 0.1233
_SETTINGS = (
    "expert.network.params={width: 256, depth: 6, num_heads: 4, patch_size: 2}",
    "island.accelerator=cpu",
    f"island.checkpoint_every_n_minutes={MINUTES}",
    f"island.publish_every_n_minutes={MINUTES}",
    "island.validate_every_n_steps=100000",
)


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    options.overrides = [*_SETTINGS, f"expert.train.max_steps={60 if options.quick else 200}"]
    rounds: list[dict[str, Seconds]] = []
    report = Report("Seconds (processor seconds) of a training", ["round", *ARMS])
    with tempfile.TemporaryDirectory(prefix="publishing-") as temporary:
        folder = Path(temporary)
        experiment = load(options, f"run_dir={folder / 'home'}")
        prepare(experiment, folder / "home")
        Run.open(experiment, create=True)
        (folder / "store").mkdir()
        with servers.s3(folder / "store", folder, SimpleNamespace(setenv=os.environ.__setitem__)) as (url, _):
            for number in range(1 if options.quick else ROUNDS):
                order = ARMS if number % 2 else ARMS[::-1]
                times = {arm: train(options, folder, f"{url}/{number}", arm) for arm in order}
                rounds.append(times)
                report.row(str(number), *(f"{times[arm].wall:.1f} ({times[arm].cpu:.1f})" for arm in ARMS))

    plain = [times["plain"] for times in rounds]
    publishing = [times["publishing"] for times in rounds]
    for name, clock in (("publish_over_plain", "wall"), ("cpu_publish_over_plain", "cpu")):
        found = ratios(publishing, plain, clock)
        report.figures |= {name: statistics.median(found), f"{name}_low": min(found), f"{name}_high": max(found)}

    report.note(", ".join(f"{name} {value:.3f}" for name, value in report.figures.items()))
    report.finish(options.json)


def train(options: Namespace, folder: Path, url: str, arm: str) -> Seconds:
    """Train the expert once; its time from its first step to its last, and the processor time of the whole process."""
    home = folder / "home"
    place = folder / "run"
    words = ["fit", "-c", options.config, *options.overrides, f"run_dir={place}", f"member={MEMBER}", LOGS_SAMPLES]
    if arm == "publishing":
        publish_prepared(Run(load(options, f"run_dir={home}", f"remote={url}")), lambda _done, _total: None)
        words.append(f"remote={url}")

    shutil.copytree(home / "prepared", place / "prepared")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    training = Training(words, folder / "steps", (), {"OMP_NUM_THREADS": "1"})
    training.process.ended()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = [began for _, began in training.steps()]
    shutil.rmtree(place)
    training.log.unlink()
    return Seconds(times[-1] - times[0], sum(after[:2]) - sum(before[:2]))


if __name__ == "__main__":
    run(main)
