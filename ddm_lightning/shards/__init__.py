"""Shards: written by ``prepare``, read by training.

- ``manifest``: what they hold; ``verify``: whether they are whole; ``fetch``: bring them from a URL
- ``mds``, ``mosaic``: read the format; ``datamodule``: the order of an epoch, batches; ``ahead``: read ahead in threads
"""
