"""A complete experiment on the synthetic blobs, small enough to prepare in a fraction of a second."""

from ddm_lightning.config.experiment import (
    ConditionConfig,
    Experiment,
    ExpertConfig,
    PartitionConfig,
    PluginConfig,
    PrepareConfig,
    RouterConfig,
    TrainConfig,
)


def tiny_experiment(num_samples=60, num_clusters=2, num_fine_centroids=12, seed=0, **prepare):
    train = TrainConfig(max_steps=1, global_batch_size=4)
    return Experiment(
        name="tiny",
        seed=seed,
        prepare=PrepareConfig(
            source=PluginConfig("blobs", {"num_samples": num_samples, "image_size": 8}),
            caption_encoder=PluginConfig("hashed-words", {"size": 8}),
            features=PluginConfig("pooled-pixels"),
            partition=PartitionConfig(
                num_clusters=num_clusters, num_fine_centroids=num_fine_centroids, max_largest_over_mean=1.1
            ),
            **prepare,
        ),
        condition=ConditionConfig(kind="text"),
        expert=ExpertConfig(network=PluginConfig("dit"), train=train),
        router=RouterConfig(network=PluginConfig("router-dit"), train=train),
    )
