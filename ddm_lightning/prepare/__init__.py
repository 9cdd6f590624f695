"""From a source of images to one folder of MDS shards per cluster."""
