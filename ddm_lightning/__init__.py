"""Decentralized Diffusion Models: experts trained on islands that share no network.

A data set is split into K clusters. K flow-matching experts train on one cluster each, on machines
that never communicate, and a small router learns which cluster a noisy sample came from. For
sampling, the experts' velocities, weighted by the router, form the velocity of one model trained on
everything (McAllister, Tancik, Song, Kanazawa; CVPR 2025; arXiv 2501.05450).

Importing this package imports neither torch nor Lightning. Code that imports Lightning or Streaming
must first call ``ddm_lightning.core.compat.ensure_torchvision_importable()``.
"""

__version__ = "0.1.0"
