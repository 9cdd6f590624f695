"""Sources and encoders of the shipped experiments, written as plug-ins; the entry points are in ``setup.py``."""
