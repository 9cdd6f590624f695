"""Shards: written by ``prepare``, read by training.

- ``manifest``: what they hold; ``verify``: whether they are whole; ``fetch``: bring them from a URL
- ``mds``, ``mosaic``: read the format; ``order``: of samples in buckets; ``datamodule``: batches
- ``ahead``: read ahead in threads
"""
