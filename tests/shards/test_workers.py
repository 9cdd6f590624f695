"""Loading processes, however Python starts them: by default forked up to Python 3.13, by a fork server from 3.14 on."""

import json
import multiprocessing
import time

import pytest
from deadline import within
from filelock import FileLock
from forked import Forked
from shards.mds import WARNINGS, write_mds

from ddm_lightning.core.files import atomic_write_json
from ddm_lightning.core.processes import start_time
from ddm_lightning.shards.datamodule import ClusterDataModule

pytestmark = WARNINGS


@pytest.mark.parametrize(
    ("method", "num_workers"),
    [("fork", 2), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("spawn", "forkserver"))],
)
def test_workers_load_samples_and_end_with_a_killed_parent(tmp_path, method, num_workers):
    """Even one that waits for the third of three shards, which another process is fetching."""
    write_mds(tmp_path / "shards/cluster-0/held-out", range(40))
    answer, store = tmp_path / "answer.json", tmp_path / "cache/store/cluster-0/held-out"

    def validate():
        multiprocessing.set_start_method(method, force=True)
        url, settings = f"file://{tmp_path}/shards", {"num_workers": num_workers, "held_out_clusters": [0]}
        loader = ClusterDataModule(url, [0], 4, seed=0, cache=tmp_path / "cache", **settings).val_dataloader()
        batches = iter(loader)
        ids = [i for _ in range(8) for i in next(batches)["sample_id"].tolist()]
        atomic_write_json(answer, [ids, [worker.pid for worker in multiprocessing.active_children()]])
        next(batches)

    store.mkdir(parents=True)
    with FileLock(store / "shard.00002.mds.lock"), within(180):
        parent = Forked(validate, tmp_path / "said")
        while not answer.exists():
            assert parent.process.is_alive(), parent.finish()
            time.sleep(0.02)
        parent.process.kill()
        ids, workers = json.loads(answer.read_text())
        assert (ids, len(workers)) == ([*range(32)], num_workers)
        while any(start_time(worker) for worker in workers):
            time.sleep(0.02)
