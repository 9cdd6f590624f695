"""The Python side of ``device.cpp``: ``torch.cuda`` for a CPU build of torch, and a record of waits and copies."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

Event = tuple[str, str]
"""Kind of an event, and its place.

Kinds: ``wait`` (the host waits for the device: for a number, or for a copy from it), ``blocking upload`` (a copy to the
device that waits, because it was not asked to be ``non_blocking``), ``upload`` and ``download`` (copies from and to
page-locked memory, beside which the host goes on) and ``staged upload`` (not page-locked: the driver copies it first).
"""
GIGABYTE = 10**9
_PACKAGES = ("ddm_lightning", "lightning", "torchmetrics")


class Recorder:
    """Counts events by kind and place."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.counts: collections.Counter[Event] = collections.Counter()
        # Kept alive as long as the library may call it.
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(self._heard)
        library.virtual_cuda_listen(self._callback)

    def _heard(self, kind: bytes, what: bytes) -> None:
        self.counts[kind.decode(), place(sys._getframe(1)) or f"elsewhere: {what.decode()}"] += 1

    @contextlib.contextmanager
    def fresh(self) -> Iterator[collections.Counter[Event]]:
        """Count what happens within the block apart from the rest."""
        outer = self.counts
        self.counts = collections.Counter()
        try:
            yield self.counts
        finally:
            self.counts = outer


def place(frame):
    """Where an event comes from: the innermost function of ours, then Lightning's or torchmetrics' within it.

    ``training.guard:find_skipped``, say, or ``training.module:log_figures > module:log_dict``; empty in the threads
    of the backward pass. Without line numbers, so that an allow-list stays true when code above moves.
    """
    within = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        function = frame.f_code.co_name
        # Comprehensions have no frame from Python 3.12 on, and Lightning's utilities say nothing of what they serve.
        if name.partition(".")[0] in _PACKAGES and not function.startswith("<") and ".utilities." not in name:
            if name.startswith("ddm_lightning"):
                here = f"{name.removeprefix('ddm_lightning.')}:{function}"
                return f"{here} > {within}" if within else here
            within = within or f"{name.rpartition('.')[2]}:{function}"
        frame = frame.f_back

    return within


class _Stream:
    """A stream without an order of its own: everything is done when it is asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def install():
    """Make ``torch.cuda`` use the preloaded virtual device; return the record of its events.

    Call it right after ``import torch``, before anything takes a function of ``torch.cuda`` by its name.
    """
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    library.virtual_cuda_pin.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.virtual_cuda_unpin.argtypes = [ctypes.c_void_p]
    recorder = Recorder(library)
    started_in = os.getpid()
    count = library.virtual_cuda_num_devices()
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIGABYTE, multi_processor_count=132
    )

    def exchange_device(index: int) -> int:
        before = library.virtual_cuda_device()
        if index >= 0:
            library.virtual_cuda_set_device(index)

        return before

    def host_register(address: int, num_bytes: int, _flags: int) -> int:
        library.virtual_cuda_pin(address, num_bytes)
        return 0

    def host_unregister(address: int) -> int:
        library.virtual_cuda_unpin(address)
        return 0

    def synchronize(*_: Any) -> None:
        recorder._heard(b"wait", b"synchronize")

    bindings: dict[str, Any] = {
        "init": lambda: None,
        "getDeviceCount": lambda: count,
        "getCurrentRawStream": lambda _: 0,
        "getDevice": lambda: library.virtual_cuda_device(),
        "setDevice": lambda index: library.virtual_cuda_set_device(index),
        "synchronize": synchronize,
        "emptyCache": lambda: None,
        "clearCublasWorkspaces": lambda: None,
        "memoryStats": lambda _: {"allocated_bytes": {"all": {"current": GIGABYTE, "peak": GIGABYTE}}},
        "resetPeakMemoryStats": lambda _: None,
        "resetAccumulatedMemoryStats": lambda _: None,
    }
    for name, function in bindings.items():
        setattr(torch._C, f"_cuda_{name}", function)

    replaced: dict[str, Any] = {
        "_cudart": SimpleNamespace(
            cudaHostRegister=host_register,
            cudaHostUnregister=host_unregister,
            cudaMemGetInfo=lambda _: (properties.total_memory, properties.total_memory),
        ),
        # A forked process must not touch CUDA; a data loader's worker that does is a defect.
        "_is_in_bad_fork": lambda: os.getpid() != started_in,
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": exchange_device,
        "get_device_properties": lambda *_: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "default_generators": tuple(torch.Generator(torch.device("cuda", index)) for index in range(count)),
        "Stream": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda _: contextlib.nullcontext(),
    }
    for name, value in replaced.items():
        assert hasattr(torch.cuda, name), f"torch.cuda has no {name} any more"
        setattr(torch.cuda, name, value)

    return recorder
