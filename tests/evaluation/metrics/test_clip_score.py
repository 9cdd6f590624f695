import numpy as np
import pytest
import torch
from encoders.tiny_models import save_clip
from torchmetrics.multimodal import CLIPScore

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import METRICS

CAPTIONS = ["a red dog", "the table", "an apple on the table"] * 7


def test_agrees_with_torchmetrics_and_needs_no_real_images(tmp_path):
    from transformers import CLIPImageProcessor, CLIPProcessor, CLIPTokenizer

    model = save_clip(tmp_path, whole=True)
    CLIPImageProcessor().save_pretrained(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (len(CAPTIONS), 16, 16, 3), dtype=np.uint8)
    metric = METRICS.build("clip-score", {"path": str(tmp_path)})
    metric.update(images, real=True)
    for rows in (slice(0, 11), slice(11, None)):
        metric.update(images[rows], CAPTIONS[rows], real=False)

    (score,) = metric.scores().values()

    tokenizer = CLIPTokenizer.from_pretrained(tmp_path)
    theirs = CLIPScore(lambda: (model, CLIPProcessor(CLIPImageProcessor(), tokenizer)))
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2)
    theirs.update(pixels, CAPTIONS)
    assert score.value == pytest.approx(float(theirs.compute()), rel=1e-3, abs=1e-4)
    # Chunks of eight, eleven images at a time: the interval is that of the mean of the chunks' means.
    singles = []
    for image, caption in zip(pixels, CAPTIONS, strict=True):
        one = CLIPScore(lambda: (model, CLIPProcessor(CLIPImageProcessor(), tokenizer)))
        one.update(image, caption)
        singles.append(float(one.score))  # which ``compute`` clips at 0

    means = [np.mean(singles[rows]) for rows in (slice(0, 8), slice(8, 11), slice(11, 19), slice(19, 21))]
    assert score.high - score.low == pytest.approx(2 * 1.96 * np.std(means, ddof=1) / 2, rel=1e-2)


def test_a_caption_that_is_too_long_counts_up_to_the_model_s_last_position(tmp_path):
    from transformers import CLIPImageProcessor, CLIPTokenizer

    model = save_clip(tmp_path, whole=True)  # of 20 positions, and a token a letter
    processor = CLIPImageProcessor()
    processor.save_pretrained(tmp_path)
    captions = ["the apple on the table", "a table " * 9, "dog " * 30, "", "🍎" * 12, "a" + " b" * 17]
    images = np.random.default_rng(0).integers(0, 256, (len(captions), 16, 16, 3), dtype=np.uint8)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path)
    begin = tokenizer.bos_token_id
    end = tokenizer.eos_token_id
    for image, caption in zip(images, captions, strict=True):
        metric = METRICS.build("clip-score", {"path": str(tmp_path)})
        metric.update(image[None], [caption])
        # Without the library's padding, masks and truncation.
        ids = torch.tensor([[begin, *tokenizer(caption, add_special_tokens=False)["input_ids"][:18], end]])
        text = model.get_text_features(ids)
        seen = model.get_image_features(processor(images=[image], return_tensors="pt")["pixel_values"])
        expected = 100 * torch.cosine_similarity(text, seen)
        assert metric.score.item() == pytest.approx(expected.item(), abs=1e-3), caption


def test_a_missing_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"gone: is no folder, needed by metric 'clip-score'; set its parameter 'path'"):
        METRICS.build("clip-score", {"path": str(tmp_path / "gone")})
