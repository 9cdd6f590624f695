"""Routing strategies, one file each, named after the strategy; a new file is found by its name."""
