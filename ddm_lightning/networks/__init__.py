"""Networks in pure torch; a model file knows nothing of sharding, compilation or training.

- ``dit``, ``mmdit``, ``unet``, ``diffusers``, ``router``: the built-in experts and router; importing this package
  registers them
- ``blocks``, ``embeddings``, ``recipe``: their parts and options
- ``attention``: one function with several back ends
- ``flops``: measured floating-point operations
"""

from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.networks.attention import set_attention
from ddm_lightning.networks.diffusers import DiffusersTransformer
from ddm_lightning.networks.dit import DiT
from ddm_lightning.networks.mmdit import MMDiT
from ddm_lightning.networks.router import RouterDiT
from ddm_lightning.networks.unet import UNet

__all__ = ["EXPERTS", "ROUTERS", "DiT", "DiffusersTransformer", "MMDiT", "RouterDiT", "UNet", "set_attention"]
