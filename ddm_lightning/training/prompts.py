"""The experiment's prompts, encoded once for all members of a run: an island may lack the caption encoder.

``prompts/KEY.safetensors`` in the run folder and at ``remote`` is named after prompts and encoder, so that changed
prompts are another file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from safetensors.torch import load_file

from ddm_lightning.core import remote
from ddm_lightning.core.files import sha256_json
from ddm_lightning.core.weights import save_weights
from ddm_lightning.encoders.captions import encode_texts
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.run import Run
from ddm_lightning.training.objective import build_caption_encoder

MAX_PROMPTS = 8


def fixed_prompts(run: Run) -> list[str]:
    """The first different ones of ``sample.prompts``; empty if the members are not conditioned on text."""
    experiment = run.experiment
    if experiment.condition.kind in ("class", "none"):
        return []

    return list(dict.fromkeys(experiment.sample.prompts))[:MAX_PROMPTS]


def prompt_condition(run: Run, prompts: Sequence[str]) -> Condition | None:
    """Read the condition of each prompt, on the CPU; encode and publish it first if it is neither here nor at the URL.

    Returns:
        None without prompts.

    Raises:
        UserError: the run's caption encoder is not on this machine, or another one; or the URL cannot be reached.
    """
    if not prompts:
        return None

    experiment = run.experiment
    encoder = experiment.prepare.caption_encoder
    kind = experiment.condition.kind
    key = sha256_json([prompts, kind, encoder and asdict(encoder)])
    name = f"prompts/{key[:16]}.safetensors"
    path = run.folder.root / name
    if run.url and not path.exists():
        with remote.reaching(), suppress(FileNotFoundError):
            remote.get(f"{run.url}/{name}", path)

    if not path.exists():
        condition = encode_texts(prompts, build_caption_encoder(run), kind)
        values = {"values": condition.values}
        if condition.vectors is not None:
            values["vectors"] = condition.vectors

        save_weights(path, values, str(path))
        if run.url:
            with remote.reaching():
                remote.put(path, f"{run.url}/{name}")

    return Condition.of(**load_file(path))
