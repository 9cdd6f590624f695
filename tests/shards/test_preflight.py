import shutil
from types import SimpleNamespace

import pytest
from shards.mds import WARNINGS, write_mds

from ddm_lightning.core.errors import UserError
from ddm_lightning.shards import preflight
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.shards.order import Ranks

pytestmark = WARNINGS


@pytest.fixture
def free(monkeypatch):
    """A disk of which so much is free, by the folder that is asked for."""
    answers = {}
    real = shutil.disk_usage

    def usage(path):
        return SimpleNamespace(free=answers[str(path)]) if str(path) in answers else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return answers


def trainer_of(num_nodes=1, ranks_per_node=1, rank=0):
    return SimpleNamespace(
        num_nodes=num_nodes,
        world_size=num_nodes * ranks_per_node,
        global_rank=rank,
        strategy=SimpleNamespace(broadcast=lambda value: value),
    )


def module_of(folder, tmp_path, batch_size=6, trainer=None, **settings):
    data = ClusterDataModule(folder, [0], batch_size, seed=0, cache=tmp_path / "cache", **settings)
    data.trainer = trainer
    data.prepare_data()
    return data


def test_a_batch_is_shared_equally_or_refused():
    assert preflight.rank_batch_size(12, Ranks(2, 3)) == 2
    with pytest.raises(UserError, match=r"10 samples a step cannot be shared equally by 4 devices; .*island\.devices"):
        preflight.rank_batch_size(10, Ranks(1, 4))


def test_samples_for_at_least_one_step_of_all_ranks(tmp_path):
    write_mds(tmp_path / "shards/cluster-0/train", range(20))
    with pytest.raises(UserError, match="hold 20 training samples, fewer than the 24 of one step; lower global_batch"):
        module_of(tmp_path / "shards", tmp_path, 24, trainer_of(ranks_per_node=4)).train_dataloader()


@pytest.mark.parametrize(("canonical", "nodes"), [(1, 1), (1, 4), (4, 2), (2, 4), (8, 8)])
def test_canonical_nodes_that_fit(canonical, nodes):
    preflight.check_nodes(canonical, nodes)


@pytest.mark.parametrize(("canonical", "nodes"), [(3, 2), (2, 3), (0, 1)])
def test_canonical_nodes_that_do_not_fit(tmp_path, canonical, nodes):
    write_mds(tmp_path / "shards/cluster-0/train", range(20))
    data = module_of(tmp_path / "shards", tmp_path, trainer=trainer_of(nodes), num_canonical_nodes=canonical)
    with pytest.raises(UserError, match=f"num_canonical_nodes = {canonical} does not fit {nodes} nodes: .*multiple of"):
        data.train_dataloader()


def test_a_disk_too_small_for_what_is_to_be_fetched(tmp_path, free):
    folder = write_mds(tmp_path / "shards/cluster-0/train", range(100))
    needed = sum(path.stat().st_size for path in folder.glob("*.mds"))
    cache = tmp_path / "cache"
    free[str(cache)] = needed - 1
    with pytest.raises(
        UserError, match=rf"cache: the shards .*cluster-0/train need {needed / 1000:.1f} kB, but .* are free"
    ):
        module_of(f"file://{tmp_path}/shards", tmp_path).train_dataloader()
    free[str(cache)] = needed
    loader = module_of(f"file://{tmp_path}/shards", tmp_path).train_dataloader()
    assert len(list(loader)) == 16
    free[str(cache)] = 0  # nothing is to be fetched any more
    module_of(f"file://{tmp_path}/shards", tmp_path).train_dataloader()


def test_a_disk_too_small_for_what_is_to_be_unpacked(tmp_path, free):
    write_mds(tmp_path / "shards/cluster-0/train", range(100), compression="zstd:3")
    free[str(tmp_path / "cache/store/cluster-0/train")] = 1000
    with pytest.raises(UserError, match=r"the unpacked shards of .* need 1.* kB, but 1 kB are free .*run_dir"):
        module_of(tmp_path / "shards", tmp_path)


def test_shared_memory_counts_the_order_and_the_batches_of_the_workers():
    assert preflight.shared_memory_bytes(1000, 500, 0, 4) == 8000
    assert preflight.shared_memory_bytes(0, 500, 2, 4) == 4 * 2 * 3 * 500


@pytest.mark.parametrize("loader", ["local", "streaming"])
def test_shared_memory_too_small(tmp_path, free, loader):
    write_mds(tmp_path / "shards/cluster-0/train", range(100))
    free["/dev/shm"] = 2000
    with pytest.raises(UserError, match=r"/dev/shm: loading needs .* kB of shared memory, but 2 kB.*num_workers"):
        module_of(tmp_path / "shards", tmp_path, loader=loader, num_workers=2).train_dataloader()
    module_of(tmp_path / "shards", tmp_path, loader=loader, num_workers=0).train_dataloader()
