"""Streaming of prepared shards: one cluster, several, or all."""
