import errno
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from deadline import no_process_left
from prepare.engine_work import complain, die, die_at_first, fill_the_disk, place, square
from prepare.listed import Listener
from prepare.tiny_experiment import tiny_experiment

from ddm_lightning.config.experiment import PluginConfig, PrepareConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.prepare import engine, prepared
from ddm_lightning.prepare.engine import WORTH_PROCESSES, gpu_of, num_gpus_for, num_processes_for, run_local, run_ray
from ddm_lightning.prepare.stages import prepare


@pytest.mark.parametrize(
    ("wanted", "jobs", "samples", "num_gpus", "expected"),
    [
        (4, 10, None, 0, 4),
        (4, 10, WORTH_PROCESSES, 0, 4),
        (4, 10, WORTH_PROCESSES - 1, 0, 1),
        (4, 3, WORTH_PROCESSES, 0, 3),
        (4, 0, WORTH_PROCESSES, 0, 1),
        (1, 10, 10**9, 0, 1),
        (0, 1000, 10**9, 0, 6),
        (0, 1000, 10**9, 1, 4),
        (0, 1000, 10**9, 8, 8),  # more than the six cores
        (5, 1000, 10**9, 8, 5),
    ],
)
def test_so_many_processes_are_worth_starting(monkeypatch, wanted, jobs, samples, num_gpus, expected):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    config = PrepareConfig(num_processes=wanted, image_encoder=PluginConfig("vae", {"device": "cuda"}))
    assert num_processes_for(config, jobs, samples) == expected


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (("cuda", "cuda", "cuda"), 8),
        (("cpu", None, "cuda"), 8),
        (("cuda:1", "cuda:1", "cuda:3"), 2),
        (("cpu", "mps", None), 0),
    ],
)
def test_the_encoders_use_so_many_gpus(monkeypatch, devices, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    images, captions, features = (PluginConfig("x", {"device": device} if device else {}) for device in devices)
    config = PrepareConfig(image_encoder=images, caption_encoder=captions, features=features)
    assert num_gpus_for(config) == expected


def test_processes_take_turns_on_all_gpus():
    first, later = [gpu_of((number,), 8) for number in range(1, 33)], [gpu_of((number,), 8) for number in range(6, 14)]
    assert [first.count(gpu) for gpu in range(8)] == [4] * 8 and sorted(later) == list(range(8))
    assert sorted(gpu_of((7, number), 2) for number in (1, 2)) == [0, 1], "started by a process that was started itself"


@pytest.mark.slow
def test_each_job_is_done_once_by_processes_of_one_thread_that_are_gone_afterwards(tmp_path, monkeypatch):
    """They leave the caller's script alone, which would run again in each: it needs no ``if __name__ …``."""
    script = ModuleType("__main__")
    script.__file__ = str(tmp_path / "script.py")
    Path(script.__file__).write_text("raise SystemExit('I am run again')")
    monkeypatch.setitem(sys.modules, "__main__", script)
    jobs = [{"number": number, "rows": np.arange(number)} for number in range(9)]
    with no_process_left():
        results = dict(run_local(square, jobs, 2))
    assert sorted(results) == list(range(9))
    for number, (told, process, threads, rows) in results.items():
        assert told == number and process != os.getpid() and threads == 1
        np.testing.assert_array_equal(rows, np.arange(number) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "kind", "problem"),
    [
        (complain, UserError, "^key 'x': is wrong; mend it$"),
        (die, UserError, r"^a process of prepare was killed 2 times, .*lower prepare\.num_processes"),
        (fill_the_disk, OSError, "No space left.*'/somewhere/0'"),
    ],
)
def test_what_goes_wrong_in_a_process_comes_out_as_it_is(monkeypatch, work, kind, problem):
    monkeypatch.setattr(engine, "_MOST_DEATHS", 1)
    jobs = range(1) if work is fill_the_disk else range(1, 4)
    with no_process_left(), pytest.raises(kind, match=problem) as failure:
        list(run_local(work, jobs, 1))
    assert "\n" not in str(failure.value)
    assert kind is UserError or failure.value.errno == errno.ENOSPC


@pytest.mark.slow
def test_a_job_whose_process_was_killed_is_done_again(tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "_MOST_DEATHS", 1)  # each job has its own, as the one before it was finished
    with no_process_left():
        results = dict(run_local(die_at_first, [tmp_path / "a", tmp_path / "b"], 1))
    assert results == {0: "a", 1: "b"}


def files_of(run):
    """Every file by content, but for the records of times."""
    files = [path for path in sorted((run / "prepared").rglob("*")) if path.is_file()]
    return {
        path.relative_to(run).as_posix(): sha256_file(path)
        for path in files
        if path.name not in ("part.json", "stages.json", ".lock")
    }


def small(**changes):
    experiment = tiny_experiment(num_samples=1100)
    for name, value in changes.items():
        setattr(experiment.prepare, name, value)
    return experiment


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_write_the_same_bytes_as_one(tmp_path, monkeypatch, quick_prepare):
    monkeypatch.setattr(prepared, "GROUP_SIZE", 1)
    one = prepare(small(num_processes=1), tmp_path / "one")
    monkeypatch.setattr(engine, "WORTH_PROCESSES", 1)
    used = []
    monkeypatch.setattr(engine, "run_local", lambda *arguments: used.append(arguments) or run_local(*arguments))
    listener = Listener()
    two = prepare(small(num_processes=2), tmp_path / "two", listener)
    assert [(work.args[0].__name__, len(jobs), num) for work, jobs, num in used] == [
        ("encode_part", 3, 2),
        ("write_group", 3, 2),
    ]
    assert two == one
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")
    shard_ticks = [done for stage, done, _ in listener.ticks if stage == "shards"]
    assert shard_ticks[-1] == 1100 and shard_ticks == sorted(shard_ticks)


@pytest.fixture
def two_nodes(monkeypatch):
    """A Ray cluster of two nodes, each with declared, not real, GPUs."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    search = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search))  # for the functions of engine_work.py
    monkeypatch.setenv("RAY_worker_niceness", "0")  # else a busy machine starves the workers
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=100 << 20)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
# Ray's own:
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.long
def test_nodes_of_ray_write_the_same_bytes_each_actor_sees_a_gpu_and_a_mistake_is_one_line(
    tmp_path, monkeypatch, quick_prepare, two_nodes
):
    one = prepare(small(num_processes=1), tmp_path / "one")
    # The encoders of this machine compute on the CPU; their actors need a GPU all the same.
    monkeypatch.setattr(engine, "devices_of", lambda _: {"cuda"})
    monkeypatch.chdir(tmp_path)  # the nodes were started elsewhere
    assert prepare(small(engine="ray"), Path("ray")) == one
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "one")
    places = [found for _, found in run_ray(place, range(20), on_gpus=True)]
    assert {gpus for gpus, _, _ in places} == {"0"} and len({node for _, node, _ in places}) == 2
    with pytest.raises(UserError, match=r"^key 'x': is wrong; mend it$"):
        list(run_ray(complain, range(4)))
    with pytest.raises(OSError, match="No space left"):
        list(run_ray(fill_the_disk, range(1)))
    assert dict(run_ray(die_at_first, [tmp_path / "a"])) == {0: "a"}
