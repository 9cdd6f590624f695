"""Every command on a virtual CUDA device: no device is mixed, and the host waits only where a reason is given."""

from __future__ import annotations

from virtual_cuda.runs import Ran

ROUTED = ("wait", "ensemble.velocity:rows_by_expert")
COLUMNS = ("upload", "shards.datamodule:transfer_batch_to_device")


def test_between_log_steps_training_waits_for_nothing_and_copies_the_batch(everything: list[Ran]) -> None:
    quiet = [(ran, step) for ran in everything for step in ran.steps[1:] if not step.due]
    assert quiet
    for ran, step in quiet:
        # The rows that each expert of the teacher takes are known on the device only.
        assert set(step.counts) == ({COLUMNS, ROUTED} if "member=student" in ran.argv else {COLUMNS})
