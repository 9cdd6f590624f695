"""A module and its optimizer saved to a folder and loaded again, without a Trainer."""

from ddm_lightning.training.checkpoint import (
    CheckpointWriter,
    load_groups,
    load_tensors,
    named_groups,
    read_trainer_state,
    tensors_of,
)


def writer_of(group=None, is_rank_zero=True):
    return CheckpointWriter(group, is_rank_zero=is_rank_zero, from_device=False)


def write(path, tensors, rest=None, meanwhile=lambda: None, writer=None):
    """Save, and do something ``meanwhile``: between the copy and the end of the writing."""
    writer = writer or writer_of()
    try:
        writer.start(path, tensors, rest, lambda: None)
        meanwhile()
        writer.wait()
    finally:
        writer.close()

    return path


def save(path, module, optimizer, meanwhile=lambda: None, writer=None):
    write(path, tensors_of(module, optimizer), {"groups": named_groups(module, optimizer)}, meanwhile, writer)


def load(path, module, optimizer, group=None):
    load_tensors(path, module, optimizer, group)
    load_groups(optimizer, read_trainer_state(path)["groups"])


def names(folder):
    return sorted(path.name for path in folder.iterdir())
