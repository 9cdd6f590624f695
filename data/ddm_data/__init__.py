"""Data sets of the shipped experiments: sources written as plug-ins, found through entry points in ``setup.py``."""
