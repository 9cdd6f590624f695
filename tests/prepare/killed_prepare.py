"""Run as a script: kill ``prepare`` with SIGKILL, run it again, print what it leaves.

Once at every moment that matters, and with processes of its own at work. Children are forked
from one process that has imported everything, which makes a trial cost a fraction of a second.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from prepare.tiny_experiment import tiny_experiment

from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.files import sha256_file, sha256_json
from ddm_lightning.prepare import engine, prepared, records, report
from ddm_lightning.prepare.engine import Reporter
from ddm_lightning.prepare.stages import prepare

ensure_torchvision_importable()
import streaming  # noqa: E402, F401  once, before the forks


class Deadly(Reporter):
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
        self._moment(f"{stage}: {done} of {total}")

    def say(self, line):
        self.lines.append(line)


class DeadlyAtStage(Reporter):
    """Kills itself, or all its processes, when a stage has some of its samples done."""

    def __init__(self, stage, kill):
        super().__init__()
        self.stage, self.kill = stage, kill

    def advance(self, stage, done, total):
        if stage == self.stage and 0 < done < total:
            self.kill()


def in_child(work):
    """Start ``work`` in a forked child, which leads a process group; gives its process id."""
    child = os.fork()
    if child == 0:
        try:
            os.setpgid(0, 0)
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def signal_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def alive(group):
    """Processes of a group that still run; zombies, which wait for their parent to look, do not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(process_group) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def seconds_until_gone(group, most=20):
    """How long processes outlive the one that led them; those that do not go are ended here."""
    start = time.monotonic()
    while alive(group) and time.monotonic() - start < most:
        time.sleep(0.02)
    seconds = time.monotonic() - start
    for process in alive(group):
        os.kill(process, signal.SIGKILL)
    return seconds


def files_of(run):
    """Hashes of everything, but for the lock and the times that records hold."""
    return {
        path.relative_to(run).as_posix(): without_order(path)
        for path in sorted(run.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def without_order(path):
    """Hash of a file; of a ledger, written in more than one go, whatever its order."""
    is_ledger = path.name in ("part.json", "stages.json")
    return sha256_json(json.loads(path.read_text())) if is_ledger else sha256_file(path)


def light_report(path, *_, **__):
    path.parent.mkdir(exist_ok=True)
    path.write_text("a light stand-in")


def light_grid(path, *_, **__):
    path.write_bytes(b"another")


def kill_at_every_moment(folder, run, moments):
    for at in range(len(moments)):
        name = f"killed-{at}"
        died = signal_of(in_child(lambda name=name, at=at: run(name, at)))
        went_on = signal_of(in_child(lambda name=name: run(name)))
        lines = json.loads((folder / f"{name}.json").read_text())[1]
        yield {"at": moments[at], "died": died, "went_on": went_on, "lines": lines, "files": files_of(folder / name)}


def kill_with_processes(folder, experiment):
    """Two processes work on the parts, or the shards, when the one that started them is killed, or all of them are."""
    engine.WORTH_PROCESSES = experiment.prepare.num_processes = 1
    prepare(experiment, folder / "large")
    yield files_of(folder / "large")
    for stage, whole_group in (("encode", True), ("encode", False), ("shards", False)):
        name = f"{stage}-{'group' if whole_group else 'parent'}"
        if stage == "shards":  # and nothing else to be done
            shutil.copytree(folder / "large", folder / name)
            shutil.rmtree(folder / name / "prepared" / "shards")

        def kill(whole_group=whole_group):
            (os.killpg if whole_group else os.kill)(os.getpid(), signal.SIGKILL)

        experiment.prepare.num_processes = 2
        child = in_child(
            lambda name=name, stage=stage, kill=kill: prepare(experiment, folder / name, DeadlyAtStage(stage, kill))
        )
        started, ended = 0, (0, 0)
        while ended == (0, 0):
            started = max(started, len(alive(child)))
            ended = os.waitpid(child, os.WNOHANG)
            time.sleep(0.02)
        outlived = seconds_until_gone(child)
        experiment.prepare.num_processes = 1
        went_on = signal_of(in_child(lambda name=name: prepare(experiment, folder / name)))
        yield {
            "at": name,
            "died": os.waitstatus_to_exitcode(ended[1]),
            "started": started,
            "outlived": outlived,
            "went_on": went_on,
            "files": files_of(folder / name),
        }


def main(folder):
    # A killed process loses nothing that it wrote; waiting for the disk, and the report, would take most of the time.
    os.fsync = lambda _: None
    report.write_report, report.save_png = light_report, light_grid
    experiment = tiny_experiment()

    def run(name, dies_at=-1):
        reporter = Deadly(dies_at)
        prepare(experiment, folder / name, reporter)
        (folder / f"{name}.json").write_text(json.dumps([reporter.moments, reporter.lines]))

    def child_run(name):
        assert signal_of(in_child(lambda: run(name))) == 0

    child_run("reference")
    moments = json.loads((folder / "reference.json").read_text())[0]
    result = {"reference": files_of(folder / "reference"), "moments": moments}
    result["trials"] = list(kill_at_every_moment(folder, run, moments))

    # Several at once in one folder.
    def together(number):
        reporter = Deadly()
        prepare(experiment, folder / "shared", reporter)
        (folder / f"shared-{number}.json").write_text(json.dumps(reporter.lines))

    children = [in_child(lambda number=number: together(number)) for number in range(3)]
    result["shared_codes"] = [signal_of(child) for child in children]
    result["shared_files"] = files_of(folder / "shared")
    result["shared_lines"] = [json.loads((folder / f"shared-{n}.json").read_text()) for n in range(3)]

    # The same samples in three parts.
    records.BLOCK_SIZE = 20
    child_run("parts")
    result["parts"] = files_of(folder / "parts")
    records.BLOCK_SIZE, prepared.GROUP_SIZE = 100, 4
    result["large"], *result["processes"] = kill_with_processes(folder, tiny_experiment(num_samples=1200))
    print(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
