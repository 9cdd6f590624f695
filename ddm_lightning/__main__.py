"""Entry point of ``python -m ddm_lightning``."""

from __future__ import annotations

import sys

from ddm_lightning.cli.parser import main
from ddm_lightning.core import processes


def run() -> int:
    """Run the command line in this process and return the exit code."""
    processes.begin()
    return main()


if __name__ == "__main__":
    sys.exit(run())
