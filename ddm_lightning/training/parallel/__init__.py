"""Parallel training: strategies, ranks, and what is applied to a built module."""
