"""Launchers by name, one module each; see ``islands.job``."""
