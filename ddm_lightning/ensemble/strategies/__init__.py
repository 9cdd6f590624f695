"""Routing strategies, found by their names; a new one is a file of its own."""
