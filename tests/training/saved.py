"""A module and its optimizer saved to a folder and loaded again, without a Trainer."""

from ddm_lightning.training.checkpoint import (
    CheckpointWriter,
    load_groups,
    load_tensors,
    named_groups,
    read_trainer_state,
    tensors_of,
)


def save(path, module, optimizer, group=None, is_rank_zero=True, meanwhile=lambda: None):
    """Save, and do something ``meanwhile``: between the copy and the end of the writing."""
    writer = CheckpointWriter(group, is_rank_zero=is_rank_zero, from_device=False)
    writer.start(path, tensors_of(module, optimizer), {"groups": named_groups(module, optimizer)}, lambda: None)
    meanwhile()
    writer.wait()
    writer.close()


def load(path, module, optimizer, group=None):
    load_tensors(path, module, optimizer, group)
    load_groups(optimizer, read_trainer_state(path)["groups"])
