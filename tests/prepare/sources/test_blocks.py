import pytest

from ddm_lightning.prepare.records import block_of, block_parts


@pytest.mark.parametrize(
    ("num_samples", "sizes"),
    [(0, []), (1, [1]), (511, [511]), (512, [512]), (513, [512, 1]), (1300, [512, 512, 276])],
)
def test_blocks_hold_every_sample_once_and_in_order(num_samples, sizes):
    parts = block_parts(num_samples, "v1")

    assert [part.num_samples for part in parts] == sizes
    assert [index for part in parts for index in block_of(part)] == list(range(num_samples))
    assert len({part.name for part in parts}) == len(parts)


def test_a_large_source_has_large_blocks_in_all_of_its_files():
    parts = block_parts(1_000_001, "v1")
    assert [part.num_samples for part in parts] == [10_240] * 97 + [6_721]
    assert [part.num_samples for part in block_parts(20_000, "v1", "file", 2_000_000)] == [10_240, 9_760]


def test_a_set_that_grows_changes_its_last_block_alone():
    before, after = block_parts(700, "v1"), block_parts(900, "v1")
    assert before[0] == after[0]
    assert before[1].name == after[1].name and before[1].fingerprint != after[1].fingerprint
