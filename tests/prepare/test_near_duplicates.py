import numpy as np
import pytest
from prepare.listed import Listed, experiment_of, hashes, plug_in, record, records

from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare import near_duplicates
from ddm_lightning.prepare.near_duplicates import codes_of, find_near_duplicates
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.stages import prepare

pytestmark = pytest.mark.usefixtures("quick_prepare")


def close_to(vectors, cosines, random):
    """Unit vectors at given angles to others."""
    across = random.standard_normal(vectors.shape)
    across -= (across * vectors).sum(1, keepdims=True) * vectors
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    return cosines[:, None] * vectors + np.sqrt(1 - cosines[:, None] ** 2) * across


def test_codes_find_what_the_features_cosines_find():
    random = np.random.default_rng(0)
    # Not centred, as networks give them: strangers have a cosine of 0.4.
    strangers = random.standard_normal((2000, 64)) + 0.8
    strangers /= np.linalg.norm(strangers, axis=1, keepdims=True)
    copies = close_to(strangers[:600], random.uniform(0.8, 1, 600), random)
    features = np.concatenate([strangers, copies])
    codes = np.concatenate([codes_of(block) for block in np.split(features.astype(np.float16), 10)])  # of ten parts
    found = find_near_duplicates(codes, 0.95)
    nearest = np.tril(features @ features.T, -1).max(1)
    assert found[nearest > 0.98].mean() > 0.97
    assert found[nearest < 0.9].mean() < 0.001
    assert found[(nearest > 0.95) & (nearest < 0.96)].mean() == pytest.approx(0.5, abs=0.2)


def test_blocks_of_rows_overlap(monkeypatch):
    codes = codes_of(np.random.default_rng(0).standard_normal((200, 4)))  # few dimensions: many are alike
    whole = find_near_duplicates(codes, 0.97)
    monkeypatch.setattr(near_duplicates, "_ROWS_AT_ONCE", 1)
    np.testing.assert_array_equal(find_near_duplicates(codes, 0.97), whole)
    assert 50 < whole.sum() < 100


def brighter(one):
    return record(f"copy of {one.key}", image=np.minimum(one.image, 254) + 1)


def with_copies(num_copies):
    """Two parts; the second one has slightly brighter images of the first, behind a broken sample like one of its own.

    That one bears a key of the first part; the sample like it stays.
    """
    first, rest = records(40), records(40, "b")
    broken = record("a0", image=brighter(rest[0]).image)
    return {"one": first, "two": [broken, *map(brighter, first[:num_copies]), *rest]}


def test_the_first_of_near_duplicates_stays_and_filters_count_the_others(tmp_path, monkeypatch):
    experiment = experiment_of(
        plug_in(monkeypatch, SOURCES, Listed(with_copies(9))), near_duplicates=0.999, max_bad_fraction=0.5
    )
    manifest = prepare(experiment, tmp_path / "run")
    assert manifest.filtered == {"near-duplicate": 9} and manifest.broken == {"duplicate key": 1}
    assert (manifest.num_read, manifest.num_samples) == (90, 80)
    keys = list(Prepared(tmp_path / "run" / "prepared").texts("keys"))
    assert keys == [*(f"a{i}" for i in range(40)), *(f"b{i}" for i in range(40))]
    # Another limit encodes nothing again.
    before = hashes(tmp_path / "run" / "prepared" / "parts")
    experiment.prepare.near_duplicates = None
    assert prepare(experiment, tmp_path / "run").num_samples == 89
    assert hashes(tmp_path / "run" / "prepared" / "parts") == before
