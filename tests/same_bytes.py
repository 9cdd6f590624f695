"""Check that this checkout trains the same weights and makes grids of the same pixels as another commit, bit for bit.

    python tests/same_bytes.py COMMIT [tiny_2x digits_2x mixed_4x emoji_4x]

A restructuring must pass it. It trains everything twice on this machine, because the bytes depend on the processor: a
quarter of an hour on two cores. Runs stay in ``runs/same_bytes/COMMIT`` and are reused. Exit code 1 if bytes differ.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

REPOSITORY = Path(__file__).parents[1]
RUNS = REPOSITORY / "runs" / "same_bytes"
EXPERIMENTS = ("tiny_2x", "digits_2x", "mixed_4x", "emoji_4x")
# Files that name no solver are sampled by the default, which has changed.
OVERRIDES = {name: ["sample.solver=euler"] for name in EXPERIMENTS[:3]}
OVERRIDES["emoji_4x"] = ["expert.train.max_steps=150", "router.train.max_steps=150"]


def git(*words):
    return subprocess.run(["git", "-C", REPOSITORY, *words], check=True, capture_output=True, text=True).stdout.strip()


def hashes(code, name, folder):
    """Train the experiment ``name`` of the checkout ``code`` to the end and hash its weights and grids."""
    command = [sys.executable, "-m", "ddm_lightning", "fit", "-c", f"experiments/{name}.yaml", f"run_dir={folder}"]
    environment = {**os.environ, "PYTHONPATH": f"{code}:{code / 'data'}", "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *OVERRIDES.get(name, ())], check=True, cwd=code, env=environment, stdout=sys.stderr)
    contents = {file: file.read_bytes() for file in folder.glob("members/*/artifact/model.safetensors")}
    for file in folder.glob("samples/*.png"):
        with Image.open(file) as image:  # its text chunks name the release
            contents[file] = image.tobytes()

    return {str(file.relative_to(folder)): hashlib.sha256(contents[file]).hexdigest() for file in sorted(contents)}


def main(base, *names):
    base = git("rev-parse", "--short", base)
    here = git("rev-parse", "--short", "HEAD") + ("-changed" if git("status", "--porcelain", "ddm_lightning") else "")
    num_different = 0
    with tempfile.TemporaryDirectory() as scratch:
        other = Path(scratch) / base
        git("worktree", "add", "--detach", str(other), base)
        try:
            for name in names or EXPERIMENTS:
                before = hashes(other, name, RUNS / base / name)
                after = hashes(REPOSITORY, name, RUNS / here / name)
                for file in sorted(before.keys() | after.keys()):
                    same = before.get(file) == after.get(file)
                    num_different += not same
                    print(f"{name:10} {file:50} {before.get(file, '-')[:12]} {after.get(file, '-')[:12]} {same}")
        finally:
            git("worktree", "remove", "--force", str(other))
    print(f"{base} and {here}: {num_different or 'no'} files differ")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
