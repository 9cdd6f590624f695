"""Experts that take turns on a device too small for all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ddm_lightning.core.weights import free_bytes


class ResidentExperts(Sequence[Any]):
    """A sequence of experts of which at most ``num_resident`` are on the device; the next one loads meanwhile.

    ``experts[k]`` waits for expert k and starts to load the next one of ``turns``, because an ensemble evaluates its
    experts in order. The weights stay on the host: mapped from the artifact's file, or pinned for copies at full speed.
    On the device, they are overwritten only after the work that uses them. An expert that was taken may be used until
    ``num_resident - 1`` other experts have been taken. Iteration gives the experts on the host.

    Args:
        experts: networks on the CPU, in evaluation mode.
        device: where they are evaluated.
        num_resident: experts on the device at once, at least 2: one computes, one loads.
    """

    def __init__(self, experts: Sequence[nn.Module], device: torch.device, num_resident: int) -> None:
        self._hosts = list(experts)
        self.device = device
        self._num_resident = num_resident
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pin()

        self._loader = ThreadPoolExecutor(1, "load-expert")
        # Least recently used first.
        self._resident: OrderedDict[int, Future[dict[str, Tensor]]] = OrderedDict()
        self.turns: Sequence[int] = range(len(self._hosts))
        """Experts in the order of use; the first follows the last."""

    def _pin(self) -> None:
        """Pin the weights if they fill at most half of the free memory."""
        tensors: list[Tensor] = []
        for host in self._hosts:
            tensors += [*host.parameters(), *host.buffers()]

        if sum(tensor.nbytes for tensor in tensors) < free_bytes() / 2:
            for tensor in tensors:
                tensor.data = tensor.data.pin_memory()

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._hosts)

    def __getitem__(self, k: int) -> Callable[..., Any]:  # type: ignore[override]  # no slices
        self._request(k)
        weights = self._resident[k].result()
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

        later = [turn for turn in self.turns if turn > k]
        self._request(later[0] if later else self.turns[0])
        return lambda *inputs: functional_call(self._hosts[k], weights, inputs)

    def _request(self, k: int) -> None:
        """Mark expert k as used last; start to load it if it is not on the device."""
        if k not in self._resident:
            old: dict[str, Tensor] = {}
            if len(self._resident) == self._num_resident:
                old = self._resident.popitem(last=False)[1].result()
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))

            self._resident[k] = self._loader.submit(self._load, self._hosts[k], old)

        self._resident.move_to_end(k)

    @torch.no_grad()
    def _load(self, host: nn.Module, old: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy an expert's weights to the device, into the memory of ``old`` where shapes and types agree."""
        weights = {}
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for name, new in [*host.named_parameters(), *host.named_buffers()]:
                place = old.pop(name, None)
                if place is None or (place.shape, place.dtype) != (new.shape, new.dtype):
                    place = torch.empty_like(new, device=self.device)

                weights[name] = place.copy_(new, non_blocking=True)

        return weights
