from __future__ import annotations

import subprocess
import sys


def test_importing_the_registry_alone_finds_the_built_ins() -> None:
    """Artifacts name networks, so their readers need not know which module registers them."""
    script = (
        "from ddm_lightning.core.registry import EXPERTS, ROUTERS; import sys;"
        "EXPERTS.get('dit'); EXPERTS.get('mmdit'); ROUTERS.get('router-dit');"
        "print(*[name for name in ('lightning', 'streaming', 'xformers', 'torchvision') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
