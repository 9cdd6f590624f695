"""Time of a training that publishes its checkpoints, over one that does not, in turn.

An expert of 7.4 million parameters trains without and with ``remote`` on an S3 server on loopback, several times in
alternating order. Both write a checkpoint (118 MB) every 7.4 seconds; one publishes it. A DiT-XL/2 publishes as many
bytes per second: 9.7 GB (605 million parameters, 16 bytes each) every ten minutes, 16 MB/s.

``publish_over_plain`` is the median over pairs of the time from the first step to the last. ``cpu_publish_over_plain``
compares the processor time of the whole process, start included, which other processes disturb less.

    python benchmarks/publishing.py --json benchmarks/results/publishing.json
"""

from __future__ import annotations

import logging
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

from common import LOGS_SAMPLES, MEMBER, REPOSITORY, Report, console, load, parse, parser, run
from faults_island import Training

from ddm_lightning.islands.shared import publish_prepared
from ddm_lightning.members.run import Run
from ddm_lightning.prepare.stages import prepare

sys.path.append(str(REPOSITORY / "tests" / "shards"))
import servers  # type: ignore[import-not-found]  # of the tests

PAIRS = 8
_SETTINGS = (
    "expert.network.params={width: 256, depth: 6, num_heads: 4, patch_size: 2}",
    "island.accelerator=cpu",
    "island.checkpoint_every_n_minutes=0.1233",
    "island.publish_every_n_minutes=0.1233",
    "island.validate_every_n_steps=100000",
)


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    options.overrides = [*_SETTINGS, f"expert.train.max_steps={60 if options.quick else 200}"]
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's server tells of each request
    ratios: list[tuple[float, float]] = []
    report = Report("A training that publishes, over one that does not", ["pair", "seconds", "processor seconds"])
    with tempfile.TemporaryDirectory(prefix="publishing-") as temporary:
        folder = Path(temporary)
        experiment = load(options, f"run_dir={folder / 'home'}")
        prepare(experiment, folder / "home")
        Run.open(experiment, create=True)
        (folder / "store").mkdir()
        with servers.s3(folder / "store", folder, SimpleNamespace(setenv=os.environ.__setitem__)) as (url, _):
            for pair in range(1 if options.quick else PAIRS):
                remotes = (None, f"{url}/{pair}")
                times = [train(options, folder, to) for to in (remotes if pair % 2 else remotes[::-1])]
                plain, publishing = times if pair % 2 else times[::-1]
                ratios.append((publishing[0] / plain[0], publishing[1] / plain[1]))
                report.row(
                    str(pair), *(f"{one:.1f} / {other:.1f}" for one, other in zip(publishing, plain, strict=True))
                )
    for name, values in zip(("publish", "cpu_publish"), zip(*ratios, strict=True), strict=True):
        report.figures |= {
            f"{name}_over_plain": statistics.median(values),
            f"{name}_over_plain_low": min(values),
            f"{name}_over_plain_high": max(values),
        }
    report.note(", ".join(f"{name} {value:.3f}" for name, value in report.figures.items()))
    report.show(console())
    report.write(options.json)


def train(options: Namespace, folder: Path, url: str | None) -> tuple[float, float]:
    """Train the expert once; return seconds from first step to last, and processor seconds."""
    home, place, to = folder / "home", folder / "run", []
    if url is not None:
        publish_prepared(Run(load(options, f"run_dir={home}", f"remote={url}")), lambda _done, _total: None)
        to = [f"remote={url}"]
    words = ["fit", "-c", options.config, *options.overrides, f"run_dir={place}", f"member={MEMBER}", LOGS_SAMPLES, *to]
    shutil.copytree(home / "prepared", place / "prepared")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    training = Training(words, folder / "steps", (), {"OMP_NUM_THREADS": "1"})
    training.process.ended()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = [began for _, began in training.steps()]
    shutil.rmtree(place)
    training.log.unlink()
    return times[-1] - times[0], sum(after[:2]) - sum(before[:2])


if __name__ == "__main__":
    sys.exit(run(main))
