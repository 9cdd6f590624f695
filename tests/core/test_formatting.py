import pytest

from ddm_lightning.core.formatting import amount, duration


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000.9, "1.0 kB"),
        (118_000, "118.0 kB"),
        (1.3e12, "1.3 TB"),
        (2.5e18, "2.5 EB"),
        (2.5e21, "2.5 ZB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_fits(value, expected):
    assert amount(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2e-6, "2 µs"), (0.0125, "12.5 ms"), (90, "90 s"), (150, "2.5 min"), (9000, "2.5 h"), (864e5, "1,000 days")],
)
def test_durations_are_written_in_the_unit_that_fits(value, expected):
    assert duration(value) == expected
