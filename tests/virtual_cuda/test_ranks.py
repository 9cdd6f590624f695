"""A rank takes its own GPU before anything is on one: encoders with ``device: cuda``, and the teacher of a student."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_runs import copy_run, settings
from virtual_cuda.runs import Command, Ran, run


def note_devices(note):
    """Note the device that networks go to, and where ``cuda`` leads when they and the encoder are built."""
    from ddm_lightning.core.errors import UserError
    from ddm_lightning.core.registry import IMAGE_ENCODERS
    from ddm_lightning.evaluation import evaluate
    from ddm_lightning.training import objective

    build = IMAGE_ENCODERS.build
    begin = evaluate.Generated.__init__

    def noting(*arguments: Any) -> Any:
        note(["encoder", torch.cuda.current_device()])
        return build(*arguments)

    def beginning(*arguments: Any) -> None:
        begin(*arguments)
        note([str(arguments[0]._ensemble.device), torch.cuda.current_device()])

    def load(_: Any, device: torch.device) -> Any:
        note([str(device), torch.cuda.current_device()])
        raise UserError("enough")

    IMAGE_ENCODERS.build = noting  # type: ignore[method-assign]
    evaluate.Generated.__init__ = beginning
    objective.load_ensemble = load  # type: ignore[method-assign]


@pytest.mark.slow
def test_a_rank_takes_its_own_device_first(finished_run, tmp_path):
    """Two ranks, as torchrun starts them: the teacher, the encoder and the ensemble are on the rank's own device."""
    given = [*settings(copy_run(finished_run, tmp_path / "run")), "island.accelerator=gpu", "evaluate.num_images=8"]
    student = Command(["fit", *given, "member=student", "island.devices=2"], code=2)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}

    def rank(number: int) -> list[Ran]:
        own = {"RANK": str(number), "LOCAL_RANK": str(number), **common}
        return run([Command(["evaluate", *given]), student], "virtual_cuda.test_ranks:note_devices", own)

    with ThreadPoolExecutor(2) as pool:
        for number, (evaluated, distilled) in enumerate(pool.map(rank, range(2))):
            device = [f"cuda:{number}", number]
            assert evaluated.notes[:2] == [["encoder", number], device]
            assert distilled.notes == [device]
