#!/usr/bin/env bash
# torchmetrics, CLIPScore: every caption of more than 77 tokens has the same text vector.
#
# One would expect  a long caption to be cut as CLIP's tokenizer does it: 76 tokens and the end token.
# What happens      the metric cuts the ids itself (with a warning) and loses the end token. CLIP takes the text vector at the
#                   end token. Without one it takes position 0, the start token, whose vector is the same for all texts.
# Seen              2026-11-27, torchmetrics 1.9.0, transformers 4.57.6, torch 2.13.0 (CPU), Python 3.11; a small random CLIP:
#                     a b c …    metric   19.13, cut by the tokenizer    6.52
#                     z y x …    metric   19.13, cut by the tokenizer   39.51
#                     m m m …    metric   19.13, cut by the tokenizer   -5.54
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.1.3 pillow==12.3.0 transformers==4.57.6 torchmetrics==1.9.0
cd "$folder"
"$folder/venv/bin/python" -W ignore - <<'PY'
import json
import string
from pathlib import Path

import torch
from torchmetrics.multimodal import CLIPScore
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizerFast

letters = list(string.ascii_lowercase)
tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
Path("vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
Path("merges.txt").write_text("#version: 0.2\n")
tokenizer = CLIPTokenizerFast("vocab.json", "merges.txt", model_max_length=77)
images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
processor = CLIPProcessor(images, tokenizer)

torch.manual_seed(0)
small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
text_config = {**small, **ends, "vocab_size": len(tokens), "max_position_embeddings": 77}
vision_config = {**small, "image_size": 32, "patch_size": 8}
model = CLIPModel(CLIPConfig(text_config, vision_config, projection_dim=16)).eval()
image = torch.randint(0, 255, (3, 32, 32), dtype=torch.uint8)
metric = CLIPScore(model_name_or_path=lambda: (model, processor))

by_metric = []
by_tokenizer = []
for word in ("a b c d e f", "z y x w v u", "m m m m m m"):
    caption = " ".join([word] * 20)  # 120 tokens
    metric.reset()
    metric.update(image[None], [caption])
    by_metric.append(float(metric.score))

    inputs = processor(text=[caption], images=[image], return_tensors="pt", truncation=True, max_length=77)
    with torch.no_grad():
        output = model(**inputs)
    by_tokenizer.append(100 * float(torch.cosine_similarity(output.text_embeds, output.image_embeds)))
    print(f"{word[:5]} …    metric {by_metric[-1]:7.2f}, cut by the tokenizer {by_tokenizer[-1]:7.2f}")

assert max(by_metric) - min(by_metric) < 1e-3
assert max(by_tokenizer) - min(by_tokenizer) > 1
PY
