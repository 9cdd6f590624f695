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

import resource
import shutil
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from common import LOGS_SAMPLES, MEMBER, Report, load, parse, parser, run, store
from faults_island import Training
from step_clock import Seconds, ratios

from ddm_lightning.islands.shared import publish_prepared
from ddm_lightning.members.run import Run
from ddm_lightning.prepare.stages import prepare

ROUNDS = (8, 1)
"""In all, and with ``--quick``."""
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
    times: dict[str, list[Seconds]] = {"plain": [], "publishing": []}
    report = Report("Seconds (processor seconds) of a training", ["round", *times])
    with tempfile.TemporaryDirectory(prefix="publishing-") as temporary:
        folder = Path(temporary)
        experiment = load(options, f"run_dir={folder / 'home'}")
        prepare(experiment, folder / "home")
        Run.open(experiment, create=True)
        with store(folder) as (url, _):
            arms = list(times)
            for number in range(ROUNDS[options.quick]):
                arms.reverse()
                for arm in arms:
                    times[arm].append(train(options, folder, f"{url}/{number}", arm))

                turn = (times["plain"][-1], times["publishing"][-1])
                report.row(str(number), *map("{0.wall:.1f} ({0.cpu:.1f})".format, turn))

    for name, clock in (("publish_over_plain", "wall"), ("cpu_publish_over_plain", "cpu")):
        found = ratios(times["publishing"], times["plain"], clock)
        report.figures[name] = statistics.median(found)
        report.figures[f"{name}_low"] = min(found)
        report.figures[f"{name}_high"] = max(found)

    for name, value in report.figures.items():
        report.note(f"{name}: {value:.3f}")

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
    steps = training.steps()
    wall = steps[-1][1] - steps[0][1]
    cpu = sum(after[:2]) - sum(before[:2])
    shutil.rmtree(place)
    training.log.unlink()
    return Seconds(wall, cpu)


if __name__ == "__main__":
    run(main)
