#!/usr/bin/env bash
# diffusers, FlowMatchEulerDiscreteScheduler: the last noise level before 0 is shifted twice.
#
# One would expect  set_timesteps(n) to shift an even grid from 1 to 1/1000 once, by s·x / (1 + (s - 1)·x), as in SD3's paper
#                   (arXiv 2403.03206, equation 23).
# What happens      the scheduler takes the ends of the grid from the training sigmas, which are shifted already, and shifts the
#                   grid again. With a shift of 3 the last step starts at 0.0089, not 0.0030. Steps in between move, too.
# Seen              2026-11-27, diffusers 0.39.0, torch 2.13.0 (CPU), Python 3.11; shift 3, 10 steps, the last three:
#                     shifted once       0.4627 0.2745 0.0030
#                     scheduler.sigmas   0.4649 0.2780 0.0089
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.1.3 "huggingface-hub<1" diffusers==0.39.0
"$folder/venv/bin/python" - <<'PY'
import numpy as np
from diffusers import FlowMatchEulerDiscreteScheduler

shift, num_steps = 3.0, 10


def shifted(x):
    return shift * x / (1 + (shift - 1) * x)


scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift)
scheduler.set_timesteps(num_steps)
found = scheduler.sigmas[:num_steps].numpy()  # behind them stands the final 0
once = shifted(np.linspace(1, 1 / 1000, num_steps))
print("shifted once      ", *(f"{sigma:.4f}" for sigma in once[-3:]))
print("scheduler.sigmas  ", *(f"{sigma:.4f}" for sigma in found[-3:]))

ends_shifted = np.linspace(1, shifted(1 / 1000), num_steps)
assert np.allclose(found, shifted(ends_shifted), atol=1e-6)
assert not np.allclose(found, once, atol=1e-3)
PY
