"""Run as a script: kill ``prepare`` with SIGKILL at every moment that matters, run it again, print what it leaves.

Children are forked from one process that has imported everything, which makes a trial cost a fraction of a second.
"""

import json
import os
import signal
import sys
from pathlib import Path

from prepare.tiny_experiment import tiny_experiment

from ddm_lightning._compat import ensure_torchvision_importable
from ddm_lightning.files import sha256_file
from ddm_lightning.prepare import prepare
from ddm_lightning.prepare.progress import SilentReporter

ensure_torchvision_importable()
import streaming  # noqa: E402, F401  once, before the forks


class Deadly(SilentReporter):
    """Counts the moments of a run, and dies at one of them."""

    def __init__(self, dies_at=-1):
        self.moments, self.lines, self.dies_at = [], [], dies_at
        self._replace = os.replace
        os.replace = self._watched_replace

    def _moment(self, name):
        self.moments.append(name)
        if len(self.moments) - 1 == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def _watched_replace(self, source, target):
        self._moment(f"before {Path(target).name} appears")
        self._replace(source, target)
        self._moment(f"after {Path(target).name} appeared")

    def advance(self, stage, done, total):
        if stage != "source" or done in (1, total // 2):
            self._moment(f"{stage}: {done} of {total}")

    def say(self, line):
        self.lines.append(line)


def in_child(work):
    """Start ``work`` in a forked child; gives its process id."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def signal_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def files_of(run):
    """Hashes of everything but the record of the stages, which holds times."""
    files = {p.relative_to(run).as_posix(): sha256_file(p) for p in sorted(run.rglob("*")) if p.is_file()}
    return {name: digest for name, digest in files.items() if not name.endswith(("stages.json", ".lock"))}


def main(folder):
    # A killed process loses nothing that it wrote; waiting for the disk would be most of the time here.
    os.fsync = lambda _: None
    experiment = tiny_experiment()

    def run(name, dies_at=-1):
        reporter = Deadly(dies_at)
        prepare(experiment, folder / name, reporter)
        (folder / f"{name}.json").write_text(json.dumps([reporter.moments, reporter.lines]))

    assert signal_of(in_child(lambda: run("reference"))) == 0
    moments = json.loads((folder / "reference.json").read_text())[0]
    result = {"reference": files_of(folder / "reference"), "moments": moments, "trials": []}
    for at in range(len(moments)):
        name = f"killed-{at}"
        died = signal_of(in_child(lambda name=name, at=at: run(name, at)))
        went_on = signal_of(in_child(lambda name=name: run(name)))
        lines = json.loads((folder / f"{name}.json").read_text())[1]
        result["trials"].append(
            {"at": moments[at], "died": died, "went_on": went_on, "lines": lines, "files": files_of(folder / name)}
        )

    # Several at once in one folder.
    def together(number):
        reporter = Deadly()
        prepare(experiment, folder / "shared", reporter)
        (folder / f"shared-{number}.json").write_text(json.dumps(reporter.lines))

    children = [in_child(lambda number=number: together(number)) for number in range(3)]
    result["shared_codes"] = [signal_of(child) for child in children]
    result["shared_files"] = files_of(folder / "shared")
    result["shared_lines"] = [json.loads((folder / f"shared-{n}.json").read_text()) for n in range(3)]
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
