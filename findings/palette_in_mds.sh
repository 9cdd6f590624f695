#!/usr/bin/env bash
# Streaming (MDS): a palette image in a column of kind `pil` comes back black.
#
# One would expect  a `pil` column to give back the image that was written; mode and size do come back, so it looks right.
# What happens      the column stores mode, size and raw bytes. For modes P and PA the bytes are indices into a palette, which
#                   is not stored; the reader makes an image with an all-black palette. Many PNG and every GIF are of mode P.
# Seen              2026-11-27, mosaicml-streaming 0.13.0, Pillow 12.3.0, Python 3.11; a green pixel:
#                     written P (10, 200, 30)
#                     read    P (0, 0, 0)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 torchvision==0.28.0 pillow==12.3.0 mosaicml-streaming==0.13.0
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
import torch

try:
    import torchvision  # noqa: F401
except RuntimeError:  # a CPU torch beside a torchvision built for CUDA lacks an operator that nothing here calls
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

from PIL import Image
from streaming import MDSWriter, StreamingDataset

image = Image.new("P", (4, 4), 1)
image.putpalette([0, 0, 0, 10, 200, 30])
with MDSWriter(out="shards", columns={"image": "pil"}) as writer:
    writer.write({"image": image})
read = StreamingDataset(local="shards", batch_size=1)[0]["image"]

before, after = image.convert("RGB").getpixel((0, 0)), read.convert("RGB").getpixel((0, 0))
print("written", image.mode, before)
print("read   ", read.mode, after)
assert read.mode == "P" and before == (10, 200, 30) and after == (0, 0, 0)
PY
