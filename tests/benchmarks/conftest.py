"""Benchmarks are scripts; their folder is put where a script finds the modules beside it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
