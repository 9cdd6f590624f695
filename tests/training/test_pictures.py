import numpy as np
import torch

from ddm_lightning.training.pictures import routing_heat_map


def test_a_panel_a_timestep_with_rows_that_sum_to_one():
    confusion = (
        torch.rand(8, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([10.0, 50.0, 1.0])[:, None]
    )
    confusion[2, 1] = 0.0  # a cluster without held-out samples
    figure = routing_heat_map(confusion)
    axes = figure.get_axes()
    assert [axis.get_title() for axis in axes] == [f"t = {(index + 0.5) / 8:.2f}" for index in range(8)]
    for index, axis in enumerate(axes):
        shown = axis.get_images()[0].get_array()
        sums = confusion[index].sum(1, keepdim=True)
        expected = np.where(sums > 0, confusion[index] / sums.clamp_min(1e-9), 0)
        np.testing.assert_allclose(shown, expected, atol=1e-6)
        labels = {text.get_position(): text.get_text() for text in axis.texts}
        # Position is (column, row): the true cluster goes downwards.
        assert labels[2, 0] == f"{float(expected[0, 2]):.2f}"
        assert len(labels) == 9
