#!/usr/bin/env bash
# lightning: one training on one device logs nothing if the shell has a leftover SLURM_PROCID.
#
# One would expect  a Trainer with devices=1 and no cluster environment to be rank zero. Shells inside `srun`, and jobs that such a
#                   shell starts by ssh or tmux, inherit SLURM_PROCID; here it is 1, and no other variable of SLURM is set.
# What happens      training runs to its end, trainer.is_global_zero is True, and the logger writes no file, without a
#                   word: it asks `rank_zero_only`, which took its rank from the variable when it was imported.
# Seen              2026-11-28, lightning 2.6.6, torch 2.13.0 (CPU), tensorboard 2.21.0, Python 3.11:
#                     SLURM_PROCID unset: steps: 4 | is_global_zero: True | event files: 1
#                     SLURM_PROCID 0: steps: 4 | is_global_zero: True | event files: 1
#                     SLURM_PROCID 1: steps: 4 | is_global_zero: True | event files: 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 lightning==2.6.6 tensorboard==2.21.0 "setuptools<81"
cd "$folder"
cat >train.py <<'PY'
import logging
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 1)), batch_size=2)
trainer = L.Trainer(
    accelerator="cpu", devices=1, max_epochs=1, log_every_n_steps=1, enable_progress_bar=False,
    enable_checkpointing=False, enable_model_summary=False, logger=TensorBoardLogger(sys.argv[1]),
)
trainer.fit(Module(), data)
events = [path for path in Path(sys.argv[1]).rglob("events.*")]
print("steps:", trainer.global_step, "| is_global_zero:", trainer.is_global_zero, "| event files:", len(events))
PY
for rank in unset 0 1; do
  if [ "$rank" = unset ]; then found=$(env -u SLURM_PROCID "$folder/venv/bin/python" train.py "logs-$rank" 2>/dev/null)
  else found=$(SLURM_PROCID=$rank "$folder/venv/bin/python" train.py "logs-$rank" 2>/dev/null); fi
  echo "SLURM_PROCID $rank: $found"
  case $rank in 1) expected=0 ;; *) expected=1 ;; esac
  [[ $found == "steps: 4 | is_global_zero: True | event files: $expected" ]]
done
