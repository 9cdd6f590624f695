"""``python -m ddm_lightning``."""

from __future__ import annotations

import sys

from ddm_lightning import startup
from ddm_lightning.cli import main


def run() -> int:
    """The command line in a process of its own; the exit code."""
    startup.begin()
    return main()


if __name__ == "__main__":
    sys.exit(run())
