import itertools
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from deadline import within
from shards.mds import WARNINGS, write_mds

from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.shards.shared_memory import SHARED_MEMORY, note_end, note_start, remove_leftovers, remove_unowned
from ddm_lightning.shards.verify import ShardError

pytestmark = WARNINGS


def files_of(number):
    """Shared memory and lock files with this number."""
    places = (SHARED_MEMORY, Path(tempfile.gettempdir()))
    return {path.name for place in places for path in place.glob(f"{number:06}_*")}


def module_of(shards, cache, num_workers=0):
    return ClusterDataModule(shards, [0], 5, seed=0, cache=cache, num_workers=num_workers, loader="streaming")


def _read_for_ever(shards, cache, numbers):
    os.setsid()
    data = module_of(shards, cache, num_workers=2)
    data.prepare_data()
    loader = data.train_dataloader()
    while True:
        for batch in loader:
            numbers.put((loader.dataset.shared_memory_number, batch["sample_id"].tolist()))


@pytest.fixture
def shards(tmp_path):
    write_mds(tmp_path / "shards/cluster-0/train", range(100))
    return f"file://{tmp_path}/shards"


def test_two_members_on_one_node_and_one_is_killed(shards, tmp_path):
    """The other one goes on; the killed one's next start removes what it had left, and nothing else."""
    context = multiprocessing.get_context("fork")
    queues = [context.Queue(20), context.Queue(20)]
    members = [
        context.Process(target=_read_for_ever, args=(shards, tmp_path / f"expert-{k}/cache", queues[k])) for k in (0, 1)
    ]
    for member in members:
        member.start()
    try:
        with within(60):
            killed, other = (queue.get()[0] for queue in queues)
            assert killed != other
            # The epoch's order comes and goes with each epoch.
            kept = {name for name in files_of(other) if not name.endswith(("epoch_shape", "epoch_data"))}
            os.killpg(members[0].pid, signal.SIGKILL)  # as the scheduler or the OOM killer does
            members[0].join()
            assert {name[7:] for name in files_of(killed)} > {"locals", "next_epoch", "barrier_filelock"}

            epochs = [[queues[1].get()[1] for _ in range(20)] for _ in range(3)]
            remove_leftovers(tmp_path / "expert-1/cache")  # of the living
            assert files_of(other) >= kept
            assert files_of(killed)
            again = module_of(shards, tmp_path / "expert-0/cache")
            again.prepare_data()
            assert not files_of(killed)
            assert files_of(other) >= kept
            found = [i for batch in again.train_dataloader() for i in batch["sample_id"].tolist()]
            assert sorted(found) == list(range(100))
            epochs += [[queues[1].get()[1] for _ in range(20)] for _ in range(3)]
    finally:
        for member in members:
            if member.is_alive():
                os.killpg(member.pid, signal.SIGKILL)
                member.join()
        remove_leftovers(tmp_path / "expert-1/cache")
    # The first batch was taken from the queue before: epochs are shifted by one.
    batches = [batch for epoch in epochs for batch in epoch][19:]
    for first in range(0, len(batches) - 19, 20):
        assert sorted(i for batch in batches[first : first + 20] for i in batch) == list(range(100))


def test_a_member_that_ends_leaves_no_lock_file(shards, tmp_path):
    data = module_of(shards, tmp_path / "cache")
    data.prepare_data()
    loader = data.train_dataloader()
    number = loader.dataset.shared_memory_number
    assert len(list(loader)) == 20
    assert any("lock" in name for name in files_of(number))
    assert len(list((tmp_path / "cache/starts").iterdir())) == 1
    data.teardown("fit")
    assert not (tmp_path / "cache/starts").exists()
    assert not any("lock" in name for name in files_of(number))


@pytest.fixture
def number():
    """A number that nobody has, nor the next one; what the test leaves there goes."""
    number = 998_000 + 2 * (os.getpid() % 997)
    yield number
    for taken in (number, number + 1):
        for place in (SHARED_MEMORY, Path(tempfile.gettempdir())):
            for path in place.glob(f"{taken:06}_*"):
                path.unlink()


def fake_memory(number, folders):
    text = "\0".join([*folders, str(number)]).encode()
    (SHARED_MEMORY / f"{number:06}_locals").write_bytes((4 + len(text)).to_bytes(4, "little") + text)
    lock = Path(tempfile.gettempdir()) / f"{number:06}_barrier_filelock"
    lock.touch()
    return lock


def die(cache, **changes):
    """Make the record look like that of a process that is no more."""
    (path,) = (cache / "starts").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"born": "1"} | changes))


@pytest.mark.parametrize(
    ("there", "changes", "is_removed"),
    [
        (["/mine"], {}, True),
        (["/mine"], {"pid": 1 << 22}, True),  # above the largest pid
        (["/another's"], {}, False),  # who has taken the number since
        (["/mine"], {"boot": "before"}, False),  # shared memory did not outlive the machine's restart
    ],
)
def test_only_what_a_dead_start_had_is_removed(tmp_path, number, there, changes, is_removed):
    lock = fake_memory(number, there)
    note_start(tmp_path, number, ["/mine"])
    assert remove_leftovers(tmp_path) == []  # this process lives
    assert len(list((tmp_path / "starts").iterdir())) == 1
    die(tmp_path, **changes)
    removed = remove_leftovers(tmp_path)
    assert bool(removed) == is_removed
    assert lock.exists() != is_removed
    assert not list((tmp_path / "starts").iterdir())


def test_a_record_that_was_cut_short_is_dropped(tmp_path):
    (tmp_path / "starts").mkdir()
    for name, text in (("1-1.json", "{"), ("2-2.json", "{}"), ("3-3.json", "[]")):
        (tmp_path / "starts" / name).write_text(text)
    assert remove_leftovers(tmp_path) == []
    assert not list((tmp_path / "starts").iterdir())
    assert remove_leftovers(tmp_path / "nowhere") == []


@pytest.mark.parametrize("owner", [None, "locals", "barrier_filelock", "cache_filelock"])
def test_memory_that_nobody_owns_is_removed(number, owner):
    left = [SHARED_MEMORY / f"{number:06}_{name}" for name in ("resume", "epoch_shape", "shard_states")]
    strange = SHARED_MEMORY / f"{number:06}_of_another_program"
    for path in (*left, strange):
        path.touch()
    if owner is not None:
        place = SHARED_MEMORY if owner == "locals" else Path(tempfile.gettempdir())
        (place / f"{number:06}_{owner}").touch()
    removed = remove_unowned()
    assert [path in removed for path in left] == [owner is None] * 3
    assert [path.exists() for path in left] == [owner is not None] * 3
    assert strange.exists()


def test_what_a_dead_process_left_under_a_free_number_does_no_harm(shards, tmp_path, number, monkeypatch):
    """Streaming would resume where that process was, or end at an order of the epoch that is there already."""
    monkeypatch.setattr("streaming.base.shared.prefix._each_prefix_int", lambda: itertools.count(number))
    data = module_of(shards, tmp_path / "first")
    first = data.train_dataloader()
    note_end(tmp_path / "first", number)  # without lock files, as long as the process lives: the next number is taken
    assert first.dataset.shared_memory_number == number
    order = {"num_canonical_nodes": 1, "shuffle_seed": 1, "initial_physical_nodes": 1}
    for name, content in (
        ("epoch_shape", bytes(40)),
        ("epoch_data", bytes(8)),
        ("resume", json.dumps({"epoch": 7, "sample_in_epoch": 95, **order}).encode() + b"\0"),
    ):
        (SHARED_MEMORY / f"{number + 1:06}_{name}").write_bytes(content)
    second = module_of(shards, tmp_path / "second").train_dataloader()
    assert second.dataset.shared_memory_number == number + 1
    lists = [[batch["sample_id"].tolist() for batch in loader] for loader in (first, second)]
    assert lists[0] == lists[1]


def test_a_cache_that_was_removed_while_training_is_told(shards, tmp_path):
    loader = module_of(shards, tmp_path / "cache").train_dataloader()
    shutil.rmtree(tmp_path / "cache")
    with within(20), pytest.raises(ShardError, match=r"store/cluster-0/train/shard.0000.\.mds is not there"):
        list(loader)


def test_looking_for_a_number_leaves_no_memory_of_others_open(shards, tmp_path, monkeypatch):
    """Of killed processes there may be hundreds, and each dataset looks into all of them."""
    taken = [900_000 + os.getpid() % 997 * 100 + i for i in range(20)]
    monkeypatch.setattr("streaming.base.shared.prefix._each_prefix_int", lambda: itertools.count(taken[0]))
    for number in taken:
        fake_memory(number, ["/another's"]).unlink()  # no lock file, or it would not look

    def num_open():
        return len([path for path in Path("/proc/self/fd").iterdir() if "_locals" in os.path.realpath(path)])

    try:
        before = num_open()
        loader = module_of(shards, tmp_path / "cache").train_dataloader()
        assert loader.dataset.shared_memory_number == taken[-1] + 1
        assert num_open() == before + 2  # its own, and the map of it
        assert len(list(loader)) == 20
    finally:
        for number in taken:
            (SHARED_MEMORY / f"{number:06}_locals").unlink()
