"""Parallel training: ranks, strategies, and functions that change a network."""
