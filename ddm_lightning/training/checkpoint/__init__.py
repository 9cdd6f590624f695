"""Checkpoints: files, state, rolling policy, and a check of where one came from."""
