"""Networks by name: the built-in ones and those that other packages offer.

An expert factory is called as ``factory(x_shape=…, condition=…, **params)`` and returns an ``nn.Module`` with
``forward(x_t, t, condition) -> prediction`` and an attribute ``prediction`` that says what it predicts;
``ddm_lightning.testing.check_expert`` is the contract. A router factory takes ``num_clusters`` besides, and its
``forward`` returns the logits of p(cluster | x_t, t, condition).
"""

from __future__ import annotations

from ddm_lightning.registry import Registry

EXPERTS = Registry("expert", "ddm_lightning.experts")
ROUTERS = Registry("router", "ddm_lightning.routers")
