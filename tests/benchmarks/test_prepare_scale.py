import prepare_scale
import pytest


def test_the_model_multiplies_by_hand():
    model = prepare_scale.Model(
        num_samples=3_600_000,
        latent_bytes=700,
        text_bytes=100,
        feature_size=50,
        fit_fraction=0.1,
        gpus_per_node=2,
        gpu_samples_per_second=500.0,
        processes_per_node=4,
        store_bytes_per_second=1e6,
        num_fine_centroids=10,
        num_iterations=9,
        flops_per_second=1e6,
    )
    seconds = {"index": 1e-4, "shards": 4e-3}
    # 360,000 samples of 200 bytes; 2 x 360,000 x 10 x 50 x 10 operations.
    partition = (72 + 3600) / 3600
    one = {"index": 0.1, "encode": 1.0, "shards": 1.0 + 0.8, "partition": partition}
    assert model.hours(1, seconds) == pytest.approx(one)
    two = {"index": 0.1, "encode": (1 + 1) / 2, "shards": (1 + 1.8) / 2, "partition": partition}
    assert model.hours(2, seconds) == pytest.approx(two)
