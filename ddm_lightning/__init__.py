"""Decentralized Diffusion Models: experts trained on islands that share no network.

A data set is split into K clusters. K flow-matching experts train on one cluster each, on machines
that never talk to each other, and a small router learns which cluster a noisy sample came from. When
sampling, the experts' velocities weighted by the router are the velocity of one model trained on
everything (McAllister, Tancik, Song, Kanazawa; CVPR 2025; arXiv 2501.05450).

Importing this package imports neither torch nor Lightning. Code that imports Lightning or Streaming
calls ``ddm_lightning.core.compat.ensure_torchvision_importable()`` before it does.
"""

__version__ = "0.1.0"
