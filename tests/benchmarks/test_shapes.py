import pytest
import torch
from shapes import averaged

from ddm_lightning.evaluation.metrics.features import KernelDistance


def test_shapes_weigh_as_much_as_their_held_out_images():
    distances = [KernelDistance(1.0, torch.tensor([1.0, 2.0])), KernelDistance(4.0, torch.tensor([3.0, 5.0]))]

    whole = averaged(distances, [5, 15])

    assert whole.value == pytest.approx(3.25)
    assert whole.halves.tolist() == [2.5, 4.25]
