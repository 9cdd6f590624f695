import torch

from ddm_lightning.flow.randomness import keyed_generator


def test_the_stream_of_a_key_is_the_same_everywhere_for_ever():
    # Frozen: a change would silently change every run that resumes across it.
    assert keyed_generator(0, "noise", 3, 1000).initial_seed() == 2436836231576059526
    first = torch.randint(1 << 30, (4,), generator=keyed_generator(0, "noise", 3, 1000))
    torch.manual_seed(99)
    assert torch.equal(first, torch.randint(1 << 30, (4,), generator=keyed_generator(0, "noise", 3, 1000)))


def test_every_part_of_the_key_counts():
    keys = [(), ("a",), ("a", "b"), ("ab",), (1,), ("1",), (1, 2), (2, 1), (12,), ("1, 2",)]
    seeds = [keyed_generator(seed, *key).initial_seed() for seed in (0, 1) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
