import numpy as np
import pytest
from prepare.listed import Listed, experiment_of, hashes, plug_in, record, records

from ddm_lightning.core.registry import SOURCES
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
    strangers = random.standard_normal((4000, 64)) + 0.8
    strangers /= np.linalg.norm(strangers, axis=1, keepdims=True)
    copies = close_to(strangers[:1000], random.uniform(0.8, 1, 1000), random)
    features = np.concatenate([strangers, copies])
    codes = np.concatenate([codes_of(block) for block in np.split(features.astype(np.float16), 10)])  # of ten parts
    found = find_near_duplicates(codes, 0.95)
    nearest = np.tril(features @ features.T, -1).max(1)
    assert found[nearest > 0.98].mean() > 0.97
    assert found[nearest < 0.9].mean() < 0.001
    assert found[(nearest > 0.95) & (nearest < 0.96)].mean() == pytest.approx(0.5, abs=0.2)


def with_copies(num_copies):
    """Two parts; the second one begins with slightly brighter images of the first."""
    first = records(40)
    brighter = [record(f"copy of {one.key}", image=np.minimum(one.image, 254) + 1) for one in first[:num_copies]]
    return {"one": first, "two": [*brighter, *records(40, "b")]}


def test_the_first_of_near_duplicates_stays_and_filters_count_the_others(tmp_path, monkeypatch):
    experiment = experiment_of(plug_in(monkeypatch, SOURCES, Listed(with_copies(9))), near_duplicates=0.999)
    manifest = prepare(experiment, tmp_path / "run")
    assert manifest.filtered == {"near-duplicate": 9} and not manifest.broken
    assert (manifest.num_read, manifest.num_samples) == (89, 80)
    keys = list(Prepared(tmp_path / "run" / "prepared").texts("keys"))
    assert keys == [*(f"a{i}" for i in range(40)), *(f"b{i}" for i in range(40))]
    # Another limit encodes nothing again.
    before = hashes(tmp_path / "run" / "prepared" / "parts")
    experiment.prepare.near_duplicates = None
    assert prepare(experiment, tmp_path / "run").num_samples == 89
    assert hashes(tmp_path / "run" / "prepared" / "parts") == before
