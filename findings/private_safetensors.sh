#!/usr/bin/env bash
# safetensors: a saved file has mode 0600, whatever the umask.
#
# One would expect  save_file() to create a file as open() and torch.save() do: 0666 less the umask, here 0644.
# What happens      the file is 0600, so a colleague, or a server that runs as another user, cannot read the weights in a
#                   shared folder. The writer makes a temporary file and renames it.
# Seen              2026-11-27, safetensors 0.8.0, numpy 2.1.3, Python 3.11, umask 022:
#                     open() 0o644
#                     save_file() 0o600
set -euo pipefail
umask 022
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet safetensors==0.8.0 numpy==2.1.3
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import os
import pathlib

import numpy as np
from safetensors.numpy import save_file

pathlib.Path("plain").write_bytes(b"x")
save_file({"weight": np.zeros(2)}, "model.safetensors")
plain, saved = (os.stat(name).st_mode & 0o777 for name in ("plain", "model.safetensors"))
print("open()", oct(plain))
print("save_file()", oct(saved))
assert (plain, saved) == (0o644, 0o600)
PY
