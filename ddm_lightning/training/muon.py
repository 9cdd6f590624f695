"""Muon for the matrices of the blocks and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from ddm_lightning.training.shards import local

_BUFFER = "momentum_buffer"


class MuonWithAdamW(Optimizer):
    """torch's Muon and fused AdamW on one list of groups and one state, so that what is saved is that of one optimizer.

    Updates of Muon are scaled to the size of AdamW's (Liu et al., 2502.16982), so that both go by one learning rate and
    one weight decay.

    Args:
        muon: groups of matrices.
        adamw: groups of all other parameters.
        lr: learning rate.
    """

    found_inf: Tensor | None = None
    """1.0 on the device where this step is to change nothing, as AdamW's fused kernel reads it."""

    def __init__(self, muon: Iterable[dict[str, Any]], adamw: Iterable[dict[str, Any]], lr: float) -> None:
        self._muon = Muon(muon, lr=lr, adjust_lr_fn="match_rms_adamw")
        self._adamw = AdamW(adamw, lr=lr, fused=True)
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        num = len(self._muon.param_groups)
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:num], self.param_groups[num:]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned."""
        super().load_state_dict(state_dict)  # which makes groups and state anew
        self._share()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; with ``found_inf`` of 1 neither weights nor moments change, and the host does not wait."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]  # its fused kernel reads it
        self._adamw.step()
        self._muon_step()
        return loss

    @torch.no_grad()
    def _muon_step(self) -> None:
        """Muon's step cannot be told to do nothing: it is taken back, for which there is a copy of its matrices."""
        if self.found_inf is None:
            self._muon.step()
            return
        counts = self.found_inf == 0
        matrices = [p for group in self._muon.param_groups for p in group["params"] if p.grad is not None]
        before = [local(matrix).clone() for matrix in matrices]
        for matrix in matrices:
            gradient = local(matrix.grad)
            buffer = self.state[matrix].get(_BUFFER)
            # The momentum of its own value moves nowhere.
            still = torch.zeros_like(gradient) if buffer is None else local(buffer)
            gradient.copy_(torch.where(counts, gradient, still))
        self._muon.step()
        for matrix, old in zip(matrices, before, strict=True):
            local(matrix).copy_(torch.where(counts, local(matrix), old))


def has_muon_matrices(network: nn.Module) -> bool:
    """Whether there is anything in ``network`` for Muon."""
    return any(is_muon_matrix(name, parameter) for name, parameter in network.named_parameters())


def is_muon_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a layer's matrix within a block: not an embedding, the first or the last layer.

    Nor a table of vectors, such as a block's offsets of adaLN-single, which multiplies nothing.
    """
    is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1 and name.endswith(".weight")
    return is_matrix and name.partition(".")[0] == "blocks"
