"""``python -m ddm_lightning``."""

import sys

from ddm_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
