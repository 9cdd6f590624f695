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

SECONDS, BYTES = 10, 1 << 30
SHARD = "shard.00000.mds"
SHARDS = ("index", "manifest")
NESTED = "stands for lists in lists"
# What takes the place of any value.
VALUES = [
    *(0, 1, -1, 2, 5000, 8192, 10**6, 10**9, 2**31, 2**32, 2**63, 10**30, -(10**9), 10**400),
    *(0.5, -0.5, 1e308, 1e400, -1e400, float("nan"), True, None),
    *("", "x", "x" * 10_000, "../../../../etc/passwd", "/dev/zero", "\0", "\ud800", "é\u2028", "none", "class"),
    *([], {}, [1], [[]], [10**9] * 3, [-1, -1], [0] * 100_000, NESTED, {"name": "x"}, {"a": {"b": {}}}),
]


def somewhere_in(value, rng):
    """Where one of the values below ``value`` lies; () where there is none."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    if not keys:
        return ()
    key = rng.choice(keys)
    return (key, *(somewhere_in(value[key], rng) if rng.random() < 0.7 else ()))


def mutate(document, rng):
    """Change one or two values of ``document``; what was done."""
    done = []
    for _ in range(rng.choice((1, 1, 2))):
        path = somewhere_in(document, rng)
        if not path:
            break
        place = document
        for key in path[:-1]:
            place = place[key]
        old = place[path[-1]]
        kind = rng.choice(("value", "value", "value", "scale", "drop", "repeat"))
        if kind == "drop":
            del place[path[-1]]
        elif kind == "repeat" and isinstance(old, list):
            place[path[-1]] = old * rng.choice((0, 2, 1000))
        elif kind == "scale" and type(old) in (int, float):
            place[path[-1]] = old * rng.choice((-1, 2, 1000, 10**6))
        else:
            place[path[-1]] = rng.choice(VALUES)
        done.append(f"{kind} {'.'.join(map(str, path))} = {str(place)[:40] if kind == 'drop' else repr(place)[:80]}")
    return ", ".join(done)


def mutate_json(path, rng):
    document = json.loads(path.read_text())
    done = mutate(document, rng)
    # As deep as the parser still reads, but too deep to print or compare.
    path.write_text(json.dumps(document).replace(f'"{NESTED}"', "[" * 900 + "]" * 900))
    return f"{path.name}: {done}"


def mutate_header(path, rng):
    """Lies about types, shapes and places of weights."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    dtypes = ("F64", "F16", "BF16", "I32", "I64", "C64", "U8", "BOOL", "F8_E4M3", "F4", "X")
    if rng.random() < 0.5:
        name = rng.choice(list(header))
        header[name]["dtype"] = rng.choice(dtypes)
        done = f"{name} of {header[name]['dtype']}"
    else:
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
    return f"{path.name}: bytes {places}"


def replace_file(path, rng):
    kind = rng.choice(("pipe", "device", "outside", "circle", "folder", "empty", "missing", "cut", "sparse", "zeros"))
    content = path.read_bytes()
    if kind in ("cut", "sparse"):
        os.truncate(path, len(content) // 2 if kind == "cut" else 1 << 40)
        return f"{path.name}: {kind}"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("empty", "zeros"):
        path.write_bytes(bytes(len(content) if kind == "zeros" else 0))
    elif kind == "outside":
        (path.parent.parent / "elsewhere").write_bytes(content)
        path.symlink_to(path.parent.parent / "elsewhere")
    elif kind != "missing":
        path.symlink_to("/dev/zero" if kind == "device" else path)
    return f"{path.name}: {kind}"


def harm(run, target, rng):
    """Damage one file that ``target`` reads; in most cases also correct the hashes, as an attacker would."""
    train = run / "prepared" / "shards" / "cluster-0" / "train"
    files = {"manifest": [run / "prepared" / "manifest.json"]}
    files["index"] = [train / "index.json", next(train.rglob(SHARD))]
    name = "expert-0" if target == "artifact" else rng.choice(("expert-0", "expert-1", "router"))
    files["artifact"] = [run / "members" / name / "artifact" / file for file in ("member.json", "model.safetensors")]
    files["ensemble"] = [run / "ensemble.json", *files["artifact"]]
    # Each file, and where its hash is recorded.
    records = {
        files["artifact"][1]: files["artifact"][0],
        files["artifact"][0]: files["ensemble"][0],
        files["index"][0]: files["manifest"][0],
    }
    path = rng.choice(files[target])
    before = {file: sha256_file(file) for file in records}
    sha1 = hashlib.sha1(files["index"][1].read_bytes()).hexdigest()
    if rng.random() < 0.15:
        done = replace_file(path, rng)
    elif path.suffix == ".json":
        done = mutate_json(path, rng)
    else:
        done = rng.choice((mutate_header, mutate_header, mutate_bytes) if path.suffix != ".mds" else (mutate_bytes,))(
            path, rng
        )
    if rng.random() < 0.8:
        if is_plain(files["index"][1]) and is_plain(files["index"][0]):
            new = hashlib.sha1(files["index"][1].read_bytes()).hexdigest()
            files["index"][0].write_text(files["index"][0].read_text().replace(sha1, new))
        for file, record in records.items():
            if is_plain(file) and is_plain(record):
                record.write_text(record.read_text().replace(before[file], sha256_file(file)))
    return done


def is_plain(path):
    return path.is_file() and not path.is_symlink() and path.stat().st_size < BYTES


def read(run, target):
    """What this package does with them."""
    if target == "artifact":
        load_network(run / "members" / "expert-0" / "artifact")
    elif target == "ensemble":
        load_ensemble(read_ensemble(run / "ensemble.json"))
    else:
        experiment = load_experiment(TINY, [f"run_dir={run}"])
        opened = Run(experiment)
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
    targets = ("artifact", "ensemble", *SHARDS)
    for target in targets:
        read(source, target)  # whatever has to be imported is
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + BYTES, size + BYTES))
    for number in range(first, first + num):
        target = targets[number % len(targets)]
        run = work / str(number)
        shutil.copytree(source, run)
        done = f"{target}: {harm(run, target, random.Random(number))}"
        print(json.dumps({"number": number, "done": done}), flush=True)
        start = time.perf_counter()
        found = outcome(partial(read, run, target))
        print(json.dumps({"number": number, "found": found, "seconds": time.perf_counter() - start}), flush=True)
        shutil.rmtree(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
