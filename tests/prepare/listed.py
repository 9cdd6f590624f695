"""A source of given samples, and experiments around it and around plug-ins that a test makes up."""

import hashlib

import numpy as np
from prepare.tiny_experiment import tiny_experiment

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core.files import sha256_file
from ddm_lightning.prepare.engine import Reporter
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.records import Part, Record


class Listed:
    """Parts and samples as they are handed in: ``{name of the part: samples}``."""

    packages, attribution = (), ""

    def __init__(self, parts, num_classes=4, sized=True):
        self.samples, self.num_classes, self.sized = parts, num_classes, sized
        self.fingerprints = dict.fromkeys(parts, "1")
        self.reads = []

    def parts(self):
        return [
            Part(name, self.fingerprints[name], len(samples) if self.sized else None)
            for name, samples in self.samples.items()
        ]

    def read(self, part):
        self.reads.append(part.name)
        yield from self.samples[part.name]


def part_folder(run, name):
    """Where the columns of a part lie."""
    prepared = Prepared(run / "prepared")
    return prepared.folder_of(next(part for part in prepared.parts if part.name == name))


def state_of(folder):
    """Everything that would betray a file that was written, or written again."""
    stats = {path: path.stat() for path in sorted(folder.rglob("*"))}
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}


def hashes(folder):
    """Each file by content."""
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def record(key, *, size=8, label=0, caption=None, group=None, image=None):
    """An image of noise that hangs on the key alone."""
    seed = int.from_bytes(hashlib.sha256(str(key).encode("utf-8", "surrogatepass")).digest()[:4], "little")
    height, width = size if isinstance(size, tuple) else (size, size)
    if image is None:
        image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Record(key, image, f"image of {key}" if caption is None else caption, label, group)


def records(num, prefix="a", **how):
    return [record(f"{prefix}{index}", **how) for index in range(num)]


def plug_in(monkeypatch, registry, made, name="made-up"):
    """Make ``made`` what the registry builds under ``name``."""
    monkeypatch.setitem(registry._built_in, name, lambda: made)
    return PluginConfig(name)


def experiment_of(source, **changes):
    """The tiny experiment on another source; ``changes`` are of its ``prepare`` section."""
    experiment = tiny_experiment()
    experiment.prepare.source = source
    experiment.prepare.partition.max_largest_over_mean = 1.5
    experiment.prepare.num_processes = 1  # others would not know what a test makes up
    for name, value in changes.items():
        setattr(experiment.prepare, name, value)
    return experiment


class Listener(Reporter):
    """Remembers what it is told."""

    def __init__(self):
        self.lines, self.ticks = [], []

    def say(self, line):
        self.lines.append(line)

    def advance(self, stage, done, total):
        self.ticks.append((stage, done, total))

    @property
    def stages(self):
        return [line.partition(":")[0] for line in self.lines if ": done in" in line]
