#!/usr/bin/env bash
# diffusers: importing one network imports all of torchao, if it happens to be installed.
#
# One would expect  a library that loads its modules only when asked to leave an optional package alone until a model is
#                   quantised with it.
# What happens      models/modeling_utils.py imports every quantiser, and torchao's begins by importing torchao. A training
#                   that installs torchao for its optimizer pays for it in each process that samples with diffusers. Under
#                   warnings as errors (pytest -W error) the first import fails, as torchao 0.18 has an invalid escape
#                   sequence, which Python reports only while it compiles the file: on a machine that has imported it
#                   before, all is well.
# Seen              2026-11-28, diffusers 0.39.0, torchao 0.18.0, torch 2.13.0, Python 3.11:
#                     torchao imported: True
#                     first import under -W error: invalid escape sequence '\.' (quant_api.py, line 1542)
#                     second import, compiled in between: no error
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.39.0 torchao==0.18.0 transformers
cd "$folder"
cat > load.py <<'PY'
import sys
import warnings

# Only this warning: others are not the point.
warnings.filterwarnings("error", message=".*invalid escape sequence")
try:
    from diffusers import AutoencoderKL
except RuntimeError as error:
    print(str(error).splitlines()[-1])
else:
    print("torchao imported:", "torchao" in sys.modules)
PY
first=$(venv/bin/python load.py 2>/dev/null)
venv/bin/python -c "import torchao" 2>/dev/null
second=$(venv/bin/python load.py 2>/dev/null)
printf '%s\n' "$first" "$second"
grep -q "invalid escape sequence" <<<"$first"
test "$second" = "torchao imported: True"
