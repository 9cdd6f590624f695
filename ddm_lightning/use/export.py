"""Ensembles and members as folders for other programs: diffusers and peft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_folder, atomic_write_json, atomic_write_text
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.core.weights import save_weights
from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.members.artifact import read_artifact
from ddm_lightning.members.load import build_network, load_network
from ddm_lightning.members.run_folder import MEMBER_FILE
from ddm_lightning.networks.lora import merged, write_peft
from ddm_lightning.use.saved import TEMPLATES, save_ensemble

_MODULE = "ddm_lightning.use.diffusers_pipeline"
_PIPELINE = f'''"""Code of this folder for diffusers: the class is part of the installed package ddm_lightning."""

from {_MODULE} import DecentralizedPipeline  # noqa: F401
'''
CONDITION_FILE = "condition.safetensors"
"""Weights of a member for which its class of diffusers, or an adapter, has no place."""


def export_peft(manifest: EnsembleManifest, out: Path) -> list[str]:
    """Write each adapter as a folder that peft loads onto the base; ``out`` appears whole or not at all.

    Args:
        manifest: from ``manifest_with_about``.
        out: new folder.

    Returns:
        Weights that were trained but are no adapters; they are in ``CONDITION_FILE`` of each folder.

    Raises:
        UserError: ``out`` exists, an artifact is damaged, or no expert is an adapter.
    """
    if all(meta.lora is None for meta in manifest.metas.values()):
        raise UserError("--to peft: no expert is an adapter (expert.network.lora); export with --to ensemble")

    kept: dict[str, None] = {}
    with atomic_folder(out, is_new=True) as temporary:
        for name, folder in manifest.folders.items():
            lora = manifest.metas[name].lora
            if lora is None:
                continue

            meta, state = read_artifact(folder)
            (temporary / name).mkdir()
            inner = getattr(EXPERTS.get(meta.network), "wraps", "")
            write_peft(temporary / name, lora, state, inner)
            others = {key: value for key, value in state.items() if ".lora_" not in key}
            if others:
                save_weights(temporary / name / CONDITION_FILE, others, str(out))
                kept |= dict.fromkeys(others)

    return [*kept]


def export_diffusers(manifest: EnsembleManifest, out: Path, licence: str | None = None) -> None:
    """Write a saved ensemble that ``diffusers`` loads, too.

    Use ``DiffusionPipeline.from_pretrained(out, custom_pipeline=out, trust_remote_code=True)``.

    Raises:
        UserError: as ``save_ensemble``.
    """
    save_ensemble(manifest, out, licence)
    atomic_write_text(out / "pipeline.py", _PIPELINE)
    index = {"_class_name": ["pipeline", "DecentralizedPipeline"], "place": [_MODULE, "Place"]}
    atomic_write_json(out / "model_index.json", index)


def export_member(manifest: EnsembleManifest, out: Path, licence: str | None = None) -> list[str]:
    """Write one member as a folder that its class of diffusers loads; ``out`` appears whole or not at all.

    An adapter is merged with its base.

    Args:
        manifest: of the member alone, from ``manifest_with_about``.
        out: new folder.
        licence: licence of the weights.

    Returns:
        Weights that the class has no place for; they are in ``CONDITION_FILE``.

    Raises:
        UserError: ``out`` exists, the network is not ``diffusers``, or as ``load_network``.
    """
    ((name, folder),) = manifest.folders.items()
    meta = manifest.meta
    about = manifest.description
    if licence is not None:
        about = replace(about, licence=licence)
    if meta.network != "diffusers":
        raise UserError(
            f"{folder / MEMBER_FILE}: the network of {name} is {meta.network!r}, for which diffusers has no class; "
            "export the ensemble instead, without sample.member"
        )

    network: Any = load_network(folder)[1]
    if meta.lora is not None:
        network = build_network(replace(meta, lora=None), merged(network))

    others = {key: value for key, value in network.state_dict().items() if not key.startswith("model.")}
    with atomic_folder(out, is_new=True) as temporary:
        network.model.save_pretrained(temporary)
        if others:
            save_weights(temporary / CONDITION_FILE, others, str(out))

        template = TEMPLATES.get_template("member_card.md.j2")
        card = template.render(
            kind=type(network.model).__name__,
            name=name,
            meta=meta,
            about=about,
            others=others,
            file=CONDITION_FILE,
        )
        (temporary / "README.md").write_text(card, encoding="utf-8")

    return [*others]
