"""The experiment's prompts, encoded once for all members of a run: an island may lack the caption encoder.

``prompts/KEY.safetensors`` in the run folder is named after prompts and encoder, so that changed prompts are another
file. ``prepare`` publishes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from safetensors.torch import load

from ddm_lightning.core import remote
from ddm_lightning.core.environment import ALONE, Ranks
from ddm_lightning.core.errors import first_line, say
from ddm_lightning.core.files import sha256_json
from ddm_lightning.core.weights import save_weights
from ddm_lightning.encoders.captions import encode_texts
from ddm_lightning.flow.condition import Condition
from ddm_lightning.members.run import Run
from ddm_lightning.training.objective import build_caption_encoder
from ddm_lightning.use.rows import Rows

MAX_PROMPTS = 8


def encoded_prompts(run: Run, mine: Ranks = ALONE) -> Rows | None:
    """Return a row for each of the first distinct ``sample.prompts``, and encode them if that has not been done.

    There are no rows if members are not conditioned on text, or if the prompts cannot be encoded here, which the first
    rank says.
    """
    experiment = run.experiment
    prompts = list(dict.fromkeys(experiment.sample.prompts))[:MAX_PROMPTS]
    if experiment.condition.kind in ("class", "none") or not prompts:
        return None

    try:
        condition = prompt_condition(run, prompts)
    except Exception as error:  # noqa: BLE001  # images are not worth a training
        if mine.is_first:
            say(f"validations show samples for held-out captions, not for sample.prompts: {first_line(error)}")

        return None

    return Rows(prompts, prompts, condition)


def prompt_condition(run: Run, prompts: Sequence[str]) -> Condition:
    """Read the condition of each prompt, on the CPU; encode it first if it is neither here nor at the run's URL.

    Raises:
        UserError: the run's caption encoder is not on this machine, or another one.
        OSError: the URL cannot be reached.
    """
    kind = run.experiment.condition.kind
    encoder = run.manifest.caption_encoder
    made_by = [prompts, kind, encoder and asdict(encoder)]
    name = f"prompts/{sha256_json(made_by)[:16]}.safetensors"
    path = run.folder.root / name
    if run.url and not path.exists():
        with suppress(FileNotFoundError):
            remote.get(f"{run.url}/{name}", path)

    if not path.exists():
        values = vars(encode_texts(prompts, build_caption_encoder(run), kind))
        save_weights(path, {key: value for key, value in values.items() if value is not None}, str(path))

    return Condition(**load(path.read_bytes()))
