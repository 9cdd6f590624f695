import pytest

from ddm_lightning.islands.local import _figure


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [(None, ".4f", "–"), (0.27549, ".4f", "0.2755"), (2354.4, ".0f", "2354"), (2.4654e24, ".4f", "2.5e+24")],
)
def test_figures_fit_their_columns(value, form, shown):
    assert _figure(value, form) == shown
