#!/usr/bin/env bash
# OmegaConf's dot-list: the value of an override is YAML, so ` #` begins a comment.
#
# One would expect  key=value to take everything after the first "=", as shells, argparse and Hydra do.
# What happens      `run_dir=runs/take #2` gives "runs/take", without a warning. `seed=012` is octal (10), and
#                   `time=12:30` counts minutes in base 60 (750).
# Seen              2026-11-27, omegaconf 2.4.0, PyYAML 6.0.4, Python 3.11:
#                     run_dir 'runs/take'
#                     quoted 'runs/take #2'
#                     seed 10
#                     time 750
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet omegaconf==2.4.0 PyYAML==6.0.4
"$folder/venv/bin/python" - <<'PY'
from omegaconf import OmegaConf

given = ["run_dir=runs/take #2", "quoted='runs/take #2'", "seed=012", "time=12:30"]
found = OmegaConf.from_dotlist(given)
for key, value in found.items():
    print(key, repr(value))
assert found == {"run_dir": "runs/take", "quoted": "runs/take #2", "seed": 10, "time": 750}
PY
