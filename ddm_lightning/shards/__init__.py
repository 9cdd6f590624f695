"""Shards: written by ``prepare``, read by training."""
