"""Mutate untrusted files, then run what reads them; ``main`` does so in a process of its own.

It prints a JSON line before and after each mutation, so that a hang can be traced to its mutation.
"""

import hashlib
import json
import os
import random
import resource
import shutil
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from deadline import within
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble
from ddm_lightning.members.load import load_network
from ddm_lightning.members.run import Run
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.objective import Position, build_objective

SECONDS = 10
BYTES = 1 << 30
NESTED = "stands for lists in lists"
# What takes the place of any value.
VALUES = [
    *(0, 1, -1, 2, 5000, 8192, 10**6, 10**9, 2**31, 2**32, 2**63, 10**30, -(10**9), 10**400),
    *(0.5, -0.5, 1e308, 1e400, -1e400, float("nan"), True, None),
    *("", "x", "x" * 10_000, "../../../../etc/passwd", "/dev/zero", "\0", "\ud800", "é\u2028", "none", "class"),
    *("F16", "BF16", "I64", "C64", "BOOL", "F8_E4M3", "F4"),
    *([], {}, [1], [[]], [10**9] * 3, [-1, -1], [0] * 100_000, NESTED, {"name": "x"}, {"a": {"b": {}}}),
]


def places_in(value):
    """Every place below a JSON value: what holds it, and its key."""
    keys = ()
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))

    for key in keys:
        yield value, key
        yield from places_in(value[key])


def mutate(document, rng):
    """Change one or two values of ``document``; what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 2))):
        places = list(places_in(document))
        if not places:
            break

        holder, key = rng.choice(places)
        old = holder[key]
        kind = rng.choice(("value", "value", "value", "times", "drop"))
        if kind == "drop":
            del holder[key]
        elif kind == "times" and type(old) in (int, float, list):
            holder[key] = old * rng.choice((-1, 2, 1000))
        else:
            holder[key] = rng.choice(VALUES)

        done.append(f"{kind} {key} in {repr(holder)[:80]}")
    return ", ".join(done)


def mutate_json(path, rng):
    document = json.loads(path.read_text())
    done = mutate(document, rng)
    # As deep as the parser still reads, but too deep to print or compare.
    path.write_text(json.dumps(document).replace(f'"{NESTED}"', "[" * 900 + "]" * 900))
    return done


def mutate_header(path, rng):
    """Lies about types, shapes and places of weights."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    done = mutate(header, rng)
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
    return f"header: {done}"


def mutate_bytes(path, rng):
    content = bytearray(path.read_bytes())
    limit = min(len(content), rng.choice((8, 200, len(content))))
    places = [rng.randrange(limit) for _ in range(rng.choice((1, 1, 8)))]
    for place in places:
        content[place] = rng.randrange(256)

    path.write_bytes(content)
    return f"bytes {places}"


def replace_file(path, rng):
    """Put something else in the file's place."""
    elsewhere = path.parent.parent / "elsewhere"
    shutil.move(path, elsewhere)
    kinds = {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "outside": lambda: path.symlink_to(elsewhere),
        "circle": lambda: path.symlink_to(path),
        "folder": path.mkdir,
        "empty": path.touch,
        "missing": lambda: None,
        "cut": lambda: path.write_bytes(elsewhere.read_bytes()[:-100]),
        "sparse": lambda: (path.touch(), os.truncate(path, 1 << 40)),
        "zeros": lambda: path.write_bytes(bytes(elsewhere.stat().st_size)),
    }
    kind = rng.choice(list(kinds))
    kinds[kind]()
    return kind


def harm(run, target, rng):
    """Damage one file that ``target`` reads; in most cases also correct the hashes, as an attacker would."""
    name = "expert-0" if target == "artifact" else rng.choice(("expert-0", "expert-1", "router"))
    artifact = run / "members" / name / "artifact"
    train = run / "prepared" / "shards" / "cluster-0" / "train"
    # Each file, and where its hash is recorded; hashes of others first.
    records = {
        next(train.rglob("shard.00000.mds")): train / "index.json",
        train / "index.json": run / "prepared" / "manifest.json",
        artifact / "model.safetensors": artifact / "member.json",
        artifact / "member.json": run / "ensemble.json",
    }
    shard, index, weights, member = records
    before = {file: hashes(file) for file in records}
    path = rng.choice(
        {
            "artifact": [member, weights],
            "ensemble": [run / "ensemble.json", member, weights],
            "index": [index, shard],
            "manifest": [run / "prepared" / "manifest.json"],
        }[target]
    )
    if rng.random() < 0.15:
        done = replace_file(path, rng)
    elif path.suffix == ".json":
        done = mutate_json(path, rng)
    elif path == weights:
        done = rng.choice((mutate_header, mutate_header, mutate_bytes))(path, rng)
    else:
        done = mutate_bytes(path, rng)

    if rng.random() < 0.8:
        for file, record in records.items():
            if is_plain(file) and is_plain(record):
                text = record.read_text()
                for old, new in zip(before[file], hashes(file), strict=True):
                    text = text.replace(old, new)
                record.write_text(text)
    return f"{path.name}: {done}"


def hashes(path):
    return sha256_file(path), hashlib.sha1(path.read_bytes()).hexdigest()


def is_plain(path):
    return path.is_file() and not path.is_symlink() and path.stat().st_size < BYTES


def read(run, target):
    """What this package does with them."""
    if target == "artifact":
        load_network(run / "members" / "expert-0" / "artifact")
    elif target == "ensemble":
        load_ensemble(read_ensemble(run / "ensemble.json"))
    else:
        opened = Run(load_experiment(TINY, [f"run_dir={run}"]))
        member = opened.member("expert-0")
        objective = build_objective(member, opened)
        data = build_data(member, opened)
        data.prepare_data()
        batch = next(iter(data.train_dataloader()))
        objective.compute_losses(objective.noisy_batch(batch, Position(1)), batch)


def outcome(call):
    """``harmless``, ``refused: LINE`` or a traceback."""
    try:
        with within(SECONDS):
            call()
    except UserError as error:
        return f"refused: {error}"
    except BaseException:  # noqa: BLE001  # the point is to see all of them
        return traceback.format_exc()
    return "harmless"


def main(source, work, first, num):
    """Try mutations of the seeds from ``first`` on copies of a finished run."""
    targets = ("artifact", "ensemble", "index", "manifest")
    for target in targets:
        read(source, target)  # whatever has to be imported is

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    for number in range(first, first + num):
        target = targets[number % len(targets)]
        run = work / str(number)
        shutil.copytree(source, run)
        done = harm(run, target, random.Random(number))
        print(json.dumps({"number": number, "done": f"{target}: {done}"}), flush=True)
        start = time.perf_counter()
        found = outcome(partial(read, run, target))
        print(json.dumps({"number": number, "found": found, "seconds": time.perf_counter() - start}), flush=True)
        shutil.rmtree(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
