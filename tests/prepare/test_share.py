"""Machines that share nothing but a URL: S3's protocol (moto), and folders."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
from filelock import FileLock
from prepare import share_work
from prepare.listed import Listed, Listener, experiment_of, hashes, plug_in, record, records
from prepare.share_work import experiment_at, machine, together
from shards import servers
from shards.mds import WARNINGS
from tiny_runs import light_prepare

from ddm_lightning.config.load import to_yaml
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_json
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.islands.shared import check_free
from ddm_lightning.members.run import Run
from ddm_lightning.prepare import stages
from ddm_lightning.prepare.ledger import Store, publish_shards
from ddm_lightning.prepare.share import Share
from ddm_lightning.prepare.stages import Preparation, prepare

pytestmark = [*WARNINGS, pytest.mark.slow, pytest.mark.usefixtures("quick_prepare")]


@pytest.fixture(autouse=True)
def sizes(monkeypatch):
    share_work.set_sizes(monkeypatch.setattr)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process makes: the manifest and the folder."""
    folder = tmp_path_factory.mktemp("alone")
    with light_prepare(), pytest.MonkeyPatch.context() as patch:
        share_work.set_sizes(patch.setattr)
        return prepare(experiment_at(None), folder), folder / "prepared"


def test_two_machines_with_only_a_bucket_write_what_one_process_writes(tmp_path, monkeypatch, alone):
    (tmp_path / "remote").mkdir()
    with servers.s3(tmp_path / "remote", tmp_path, monkeypatch) as (url, _):
        (lines, manifest), (others, nothing) = together(experiment_at(url), [tmp_path / "a", tmp_path / "b"])
        assert manifest == alone[0] and nothing is None
        assert "encode: done" in " ".join(lines) and "shards: done" in " ".join(others)
        folder = tmp_path / "a" / "prepared"
        publish_shards(folder, Store(f"{url}/prepared", manifest.versions), manifest.index_sha256, lambda *_: None)
        shards = f"{url}/prepared/shards"
        written = {name: sha256(remote.read(f"{shards}/{name}")).hexdigest() for name in remote.files(shards)}
        assert written == hashes(alone[1] / "shards")
        # Nothing is left to do, wherever it is started.
        puts = []
        monkeypatch.setattr(remote, "put", lambda *arguments: puts.append(arguments))
        monkeypatch.setattr(type(SOURCES.build("blobs", {})), "read", lambda *_: pytest.fail("nothing is to be read"))
        machine(experiment_at(url), tmp_path / "c", 2, 2)
        assert [name for _, name in puts if not name.endswith(".json")] == []
    assert not list((tmp_path / "b").rglob("*.mds")), "shards are kept at the URL alone"


def test_parts_of_other_machines_do_not_stay(tmp_path, alone):
    left = tmp_path / "b" / "prepared" / "parts"
    (folder,) = (alone[1] / "parts").glob("block-000000040-*")  # of the second machine's group
    (left / folder.name).mkdir(parents=True)
    shutil.copy(folder / "x_0.npy", left / folder.name)  # as after a kill
    (_, manifest), _ = together(experiment_at(f"file://{tmp_path}/remote"), [tmp_path / "a", tmp_path / "b"])
    assert manifest == alone[0]
    assert len([*left.iterdir()]) == 2 and all((folder / "part.json").exists() for folder in left.iterdir())


@pytest.mark.parametrize(("change", "missing"), [({"held_out_fraction": 0.3}, "the partition"), ({}, "parts")])
def test_a_machine_of_other_settings_says_why_it_waits(tmp_path, change, missing):
    experiment = experiment_at(f"file://{tmp_path}/remote")
    machine(experiment, tmp_path / "a", 1, 1)
    for name, value in (change or {"horizontal_flips": True}).items():
        setattr(experiment.prepare, name, value)
    other = Preparation(experiment, tmp_path / "b", Listener(), Share(2, 2))
    with other._alone():
        assert re.fullmatch(rf"{missing}.* machine 1 \(published, but of other settings or parts.*", other._advance())


class Stopped(BaseException):
    """As if the machine were gone."""


@pytest.mark.parametrize("num_puts", [0, 5, 42])
def test_a_machine_that_is_gone_is_replaced_by_one_with_an_empty_folder(tmp_path, monkeypatch, alone, num_puts):
    experiment, puts = experiment_at(f"file://{tmp_path}/remote"), []

    def put(path, url, put=remote.put):
        puts.append(url)
        if len(puts) > num_puts:
            raise Stopped
        put(path, url)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(remote, "put", put)
        machine(experiment, tmp_path / "first", 1, 1)
    sent = set(puts[:num_puts])
    puts.clear()
    num_puts = 1000
    monkeypatch.setattr(remote, "put", put)
    assert machine(experiment, tmp_path / "second", 1, 1)[1] == alone[0]
    again = [url for url in sent & set(puts) if not url.endswith(".json")]
    assert again == [], "what had arrived is not sent again"


@pytest.mark.parametrize("kind", ["kmeans", "random", "labels", "existing"])
def test_a_sample_of_the_features_is_all_that_the_fit_reads(tmp_path, kind):
    experiment = experiment_at(f"file://{tmp_path}/remote")
    experiment.prepare.partition.fit_fraction = 0.6
    if kind == "existing":
        theirs = experiment_at(None)
        theirs.prepare.partition.kind = "random"
        prepare(theirs, tmp_path / "theirs")
        experiment.prepare.partition.path = str(tmp_path / "theirs" / "prepared" / "partition.safetensors")
    experiment.prepare.partition.kind = kind
    experiment.prepare.partition.max_largest_over_mean = 2.0
    alone = prepare(experiment, tmp_path / "alone")
    (_, manifest), _ = together(experiment, [tmp_path / "a", tmp_path / "b"])
    assert manifest == alone and sum(map(sum, manifest.class_counts)) == 100
    theirs = [path for path in (tmp_path / "a" / "prepared" / "parts").iterdir() if not (path / "part.json").exists()]
    assert len(theirs) == 2 and not any((path / "features.npy").exists() for path in theirs)


def test_duplicates_and_broken_samples_of_other_machines_are_left_out(tmp_path, monkeypatch):
    from ddm_lightning.prepare.records import BrokenSample

    first = records(30)
    again = record("again", image=first[0].image)
    parts = {"one": first, "two": [*records(4), BrokenSample("x", "empty file"), again, *records(20, "b")]}
    changes = {"max_bad_fraction": 0.5, "near_duplicates": 0.999}
    experiment = experiment_of(plug_in(monkeypatch, SOURCES, Listed(parts)), **changes)
    experiment.remote = f"file://{tmp_path}/remote"
    alone = prepare(experiment, tmp_path / "alone")
    (_, manifest), _ = together(experiment, [tmp_path / "a", tmp_path / "b"])
    assert manifest == alone and manifest.broken == {"duplicate key": 4, "empty file": 1}
    assert manifest.filtered == {"near-duplicate": 1}


def test_machines_agree_on_parts_that_one_finds_changed_after_another_has_used_them(tmp_path, monkeypatch):
    parts = {name: records(20, name) for name in "abcde"}
    source = Listed(parts)
    experiment = experiment_of(plug_in(monkeypatch, SOURCES, source))
    experiment.remote = f"file://{tmp_path}/remote"
    together(experiment, [tmp_path / "1", tmp_path / "2"])
    for name in "ab":  # of the first machine, and of the second
        source.samples[name], source.fingerprints[name] = records(21, f"new-{name}"), "2"
    partition = tmp_path / "remote" / "prepared" / "partition" / "partition.json"
    before = partition.read_bytes()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(machine, experiment, tmp_path / "1", 1, 2)
        while partition.read_bytes() == before and not first.done():  # the first machine trusts the old part
            time.sleep(0.02)
        machine(experiment, tmp_path / "2", 2, 2)
        lines, manifest = first.result()
    experiment.remote = None
    assert manifest == prepare(experiment, tmp_path / "alone") and manifest.num_samples == 102
    assert any(line.startswith("waiting for groups of machine 2 (published, but of other ") for line in lines)


def test_a_replaced_first_machine_takes_the_partition_that_others_have_used(tmp_path, monkeypatch, alone):
    experiment = experiment_at(f"file://{tmp_path}/remote")
    machine(experiment, tmp_path / "a", 1, 1)
    monkeypatch.setattr(stages, "fit_partition", lambda *_, **__: pytest.fail("on another machine it may differ"))
    assert machine(experiment, tmp_path / "b", 1, 1)[1] == alone[0]


def test_a_url_of_other_data_or_of_unfinished_parts_is_refused_at_the_start(tmp_path):
    experiment = experiment_at(f"file://{tmp_path}/remote")
    run = Run(experiment)
    _, manifest = machine(experiment, tmp_path / "a", 1, 1)
    check_free(run, parts=True)
    with pytest.raises(UserError, match=r"^key 'remote': .*/remote: holds an unfinished prepare --parts; finish it"):
        check_free(run)
    manifest.write(tmp_path / "remote")
    (tmp_path / "remote" / "experiment.yaml").write_text(to_yaml(experiment))
    check_free(run)
    experiment.prepare.source.params["num_samples"] = 130
    with pytest.raises(UserError, match=r"the experiment changed since this was written: prepare\.source\.params\.num"):
        check_free(run, parts=True)


def test_a_source_that_is_gone_afterwards_is_one_line(tmp_path, monkeypatch):
    experiment = experiment_at(f"file://{tmp_path}/remote")
    machine(experiment, tmp_path / "a", 1, 1)

    def gone(_):
        raise UserError("/media/stick: is not there")

    monkeypatch.setattr(type(SOURCES.build("blobs", {})), "parts", gone)
    with pytest.raises(UserError, match="is not there"):
        prepare(experiment, tmp_path / "a")


@pytest.mark.parametrize(
    ("files", "change", "problem"),
    [
        ("parts/*/features-*.npy", lambda content: content[:-1] + b"\x7f", "differs from its entry in size or content"),
        ("parts/*.json", lambda text: text.replace(b'"numpy": "', b'"numpy": "0.'), "was made with numpy 0."),
        ("parts/*.json", lambda text: text.replace(b'"bytes": ', b'"bytes": 9'), "differs from its entry in size"),
        ("parts/*.json", lambda text: text.replace(b'"rows.npz"', b'"../rows.npz"'), "leaves its folder"),
        ("parts/*.json", lambda _: b"[]", "is no ledger of prepare"),
        ("parts/*.json", lambda _: b"[" * 200_000, "is no ledger of prepare"),
    ],
    ids=["content", "versions", "size", "path", "a list", "too deep"],
)
def test_what_lies_about_the_parts_is_refused(tmp_path, files, change, problem):
    experiment = experiment_at(f"file://{tmp_path}/remote")
    machine(experiment, tmp_path / "all", 1, 1)
    root = tmp_path / "remote" / "prepared"
    for path in [*root.glob("groups/*.json"), *root.glob("partition/*.json")]:
        path.unlink()
    victim = next(root.glob(files))
    victim.write_bytes(change(victim.read_bytes()))

    with pytest.raises(UserError, match=problem) as refusal:
        machine(experiment, tmp_path / "another", 1, 1)
    assert "\n" not in str(refusal.value)


def test_two_machines_in_one_folder_are_refused(tmp_path):
    (tmp_path / "a" / "prepared").mkdir(parents=True)
    with FileLock(tmp_path / "a" / "prepared" / ".lock"), pytest.raises(UserError, match="a run_dir of its own"):
        machine(experiment_at(f"file://{tmp_path}/remote"), tmp_path / "a", 2, 2)


def test_a_machine_that_finds_other_parts_is_refused(tmp_path):
    url = f"file://{tmp_path}/remote"
    machine(experiment_at(url), tmp_path / "a", 1, 1)
    experiment = experiment_at(url)
    experiment.prepare.source.params["num_samples"] = 130
    with pytest.raises(UserError, match=r"remote/prepared/parts\.json: lists other parts of the source"):
        machine(experiment, tmp_path / "b", 2, 2)


@pytest.mark.parametrize("text", ["9/8", "0/8", "x", "1", "1/", "-1/8", "1/0"])
def test_shares_that_are_none_are_refused(text):
    with pytest.raises(UserError, match=f"--parts {text}: give the number of this machine and of all machines"):
        Share.parse(text)


@pytest.mark.long
def test_machines_killed_at_random_are_replaced_and_change_no_byte(tmp_path, monkeypatch, alone):
    (tmp_path / "remote").mkdir()
    with servers.s3(tmp_path / "remote", tmp_path, monkeypatch) as (url, _):
        search = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, share_work.__file__, url, str(tmp_path / "trials")],
            env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)
    wanted = sha256_json(json.loads((alone[1] / "manifest.json").read_text()))
    assert len(trials) == 1 + share_work.NUM_KILLS
    assert all(trial["codes"] == [0, 0] and trial["manifest"] == wanted for trial in trials)
    assert sum(trial["died"] == -signal.SIGKILL for trial in trials) >= 10, "killed while it worked"
