"""Load the networks of artifacts, which are untrusted.

Networks are found by name among those installed here. The header of the weights bounds what is built, so that a
description cannot fill the memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.weights import check_memory, in_short, load_weights, misfits, prefixed, read_header
from ddm_lightning.members.member import declared_path
from ddm_lightning.members.meta import REMEDY, WEIGHTS_FILE, ArtifactMeta, base_file, read_meta
from ddm_lightning.members.roles import ROLES
from ddm_lightning.members.run_folder import MEMBER_FILE
from ddm_lightning.networks.lora import adapt


def load_network(folder: Path, *, mapped: bool = False, bases: Bases | None = None) -> tuple[ArtifactMeta, nn.Module]:
    """Read an artifact's description and build its network, in evaluation mode on the CPU.

    The network is compared with the header of the weights before they are read. If ``mapped``, its weights are
    mapped from the file, so that the system can free their memory.

    Args:
        folder: the artifact.
        mapped: whether to map its weights.
        bases: where adapters find their base; networks of the same ``bases`` share it. None for the folder's own.

    Raises:
        UserError: as ``read_artifact``, ``build_network`` and ``Bases.file``.
    """
    meta = read_meta(folder)
    path = folder / WEIGHTS_FILE
    source = str(folder / MEMBER_FILE)
    header = read_header(path, REMEDY)
    if meta.lora is None:
        network = _fitting_network(meta, header, {}, source)
    else:
        network = (bases or Bases([folder])).network(meta, header, source)

    network.load_state_dict(load_weights(path, meta.model_sha256, REMEDY), assign=mapped)
    return meta, network.eval()


class Bases:
    """Frozen bases of adapters, each loaded once and shared by its adapters.

    Args:
        folders: a base is the file ``initial/SHA256/model.safetensors`` in one of these or in a folder above.
        device: where to put it.
    """

    def __init__(self, folders: Iterable[Path], device: torch.device | str = "cpu") -> None:
        self.folders = [folder.absolute() for folder in folders]
        self.device = device
        self._built: dict[str, nn.Module] = {}

    def file(self, meta: ArtifactMeta, source: str) -> Path:
        """File of the base of an artifact's adapters.

        Raises:
            UserError: there is none; the line begins with ``source``.
        """
        name = base_file(Path(), meta)
        for folder in self.folders:
            for place in (folder, *folder.parents):
                if (place / name).exists():
                    return place / name

        raise UserError(
            f"{source}: is an adapter for another base: there is no {name} in {self.folders[0]} or above it; fetch it "
            "from the run that trained the adapter"
        )

    def network(self, meta: ArtifactMeta, weights: Mapping[str, Tensor], source: str) -> nn.Module:
        """Build a network with adapters, untrained, on a base that others share.

        Args:
            meta: its description.
            weights: of the artifact, or their header.
            source: begins the error line.

        Raises:
            UserError: as ``file`` and ``build_network``, or the base is damaged or another.
        """
        alike = (meta.network, meta.params, meta.lora, meta.base_sha256, meta.x_shape, meta.condition)
        key = repr((*alike, meta.prediction, meta.path))
        if key not in self._built:
            base = load_weights(self.file(meta, source), str(meta.base_sha256), f"fetch the base of {source} again")
            self._built[key] = _fitting_network(meta, weights, base, source).to(self.device)

        first = self._built[key]
        _refuse_misfits(meta, weights, first, source)
        return copy.deepcopy(first, {id(shared): shared for shared in first.buffers()})


def build_network(
    meta: ArtifactMeta, state: Mapping[str, Tensor], base: Mapping[str, Tensor] | None = None
) -> nn.Module:
    """Build the network of ``meta`` with the weights ``state``, in evaluation mode on the CPU.

    ``base`` are the frozen weights of one with adapters.

    Raises:
        UserError: the network is unknown, refuses its parameters or exceeds the memory, the weights do not fit it, or
            it has another prediction type.
    """
    network = _fitting_network(meta, state, base or {}, meta.member)
    network.load_state_dict(dict(state))
    return network.eval()


def _fitting_network(
    meta: ArtifactMeta, weights: Mapping[str, Tensor], base: Mapping[str, Tensor], source: str
) -> nn.Module:
    """Build the network of ``meta``, untrained, and check that ``weights`` fit its names, shapes and types."""
    remedy = _install(meta)
    check_memory(weights.values(), source)
    planned: list[Tensor] = []
    with suppress(UserError, RuntimeError, ArithmeticError), torch.device("meta"):  # some plug-ins fail there
        network = _build_bounded(meta, weights, base)
        # Positional embeddings may take more memory than weights, and are computed from parts, in float64.
        planned = [*network.parameters(), *5 * [buffer for buffer in network.buffers() if buffer.is_meta]]

    check_memory(planned, source)
    try:
        network = _build_bounded(meta, weights, base)
    except (UserError, RuntimeError, ArithmeticError) as error:  # torch raises the others for sizes such as 0
        raise UserError(f"{source}: cannot be built: {first_line(error)}; {remedy}") from None

    _refuse_misfits(meta, weights, network, source)
    declared = getattr(network, "prediction", None)
    if declared != meta.prediction:
        raise UserError(f"{source}: the weights predict {meta.prediction!r}, the code {declared!r}; {remedy}")
    if (path := declared_path(network)) not in (None, meta.path):
        raise UserError(f"{source}: key 'path' is {meta.path!r}, but the code's is {path!r}; {remedy}")

    return network


def _install(meta: ArtifactMeta) -> str:
    return f"install the release of {meta.network!r} that trained the weights"


def _refuse_misfits(meta: ArtifactMeta, weights: Mapping[str, Tensor], network: nn.Module, source: str) -> None:
    if odd := misfits(weights, network.state_dict()):
        raise UserError(f"{source}: the weights do not fit: {in_short(odd)}; {_install(meta)}")


class _Uninitialised(TorchFunctionMode):
    """Leaves weights as they were allocated: those of the artifact take their place.

    Random ones would take time, and on the meta device torch would import its compiler for them, which takes a second.
    """

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return given["tensor"]

        return function(*args, **given)


def _build_bounded(meta: ArtifactMeta, weights: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> nn.Module:
    """Build a network, but stop at more than twice its weights: a plug-in may replace each of them once."""
    tensors = [*weights.values(), *base.values()]
    left = [2 * len(tensors), 2 * sum(tensor.numel() for tensor in tensors)]

    def count(_module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
        left[:] = left[0] - 1, left[1] - parameter.numel()
        if min(left) < 0:
            raise UserError("it has more weights than their file")

    if "path" in meta.params:
        raise UserError("its params name a file outside the artifact")

    hook = register_module_parameter_registration_hook(count)
    try:
        plugin = PluginConfig(meta.network, meta.params)
        with _Uninitialised():
            network = ROLES[meta.role].build(plugin, meta.x_shape, meta.condition, meta.num_clusters)

        if meta.lora is not None:
            named = prefixed(base, network)
            own = network.state_dict()
            trained = {name.replace(".base_layer.", ".") for name in weights}
            frozen = {}
            for name, value in named.items():
                if name in own and name not in trained:
                    frozen[name] = value

            adapt(network, meta.lora, frozen)

        return network
    finally:
        hook.remove()
