"""Checkpoints: files, state, and the rolling policy."""
