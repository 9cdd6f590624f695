"""A run at a URL: members trained anywhere, killed and continued elsewhere, give the bits of an undisturbed one."""

import json
import platform
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from artifact_files import put as put_artifact
from deadline import within
from islands.watching import refused, wait_for, weights
from prepare.listed import hashes
from shards import servers
from shards.mds import WARNINGS
from tiny_runs import MEMBERS, STEPS, TINY, bucket_experiment, finish, prepared, settings, start

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.islands import lease, publish
from ddm_lightning.islands.publish import Publisher, published
from ddm_lightning.islands.shared import pull_artifact
from ddm_lightning.members.checkpoints import find_resumable
from ddm_lightning.members.run import Run

pytestmark = [*WARNINGS, pytest.mark.slow]
QUICK = ("island.publish_every_n_minutes=0.001", "island.checkpoint_every_n_steps=5")


@pytest.fixture(params=["s3"])
def store(request, tmp_path, monkeypatch, quick_prepare):
    """The tiny experiment, prepared and published on a server; its URL, and the line to the server."""
    there = tmp_path / "there"
    there.mkdir()
    with getattr(servers, request.param)(there, tmp_path, monkeypatch) as (url, line):
        assert main(["prepare", *settings(tmp_path / "home"), f"remote={url}"]) == 0
        yield url, line
    remote.disconnect()


def published_steps(url):
    names = remote.files(f"{url}/members/expert-0/checkpoints")
    return sorted(name.split("/")[0] for name in names if name.endswith("/files.json"))


def start_slowly(monkeypatch, run, *more, seconds=0.35):
    """Train the first expert with so many seconds for each of 60 steps."""
    with monkeypatch.context() as patched:
        patched.setenv("STEP_SECONDS", str(seconds))
        return start("fit", run, "member=expert-0", *more, *QUICK)


@pytest.mark.parametrize(
    ("store", "is_damaged"),
    [("s3", True), pytest.param("sftp", False, marks=pytest.mark.long)],
    indirect=["store"],
    ids=["s3, the newest checkpoint is damaged", "sftp"],
)
def test_a_member_killed_with_its_folder_goes_on_elsewhere_to_the_same_bits(
    store, finished_run, tmp_path, monkeypatch, is_damaged
):
    url, _ = store
    first = start_slowly(monkeypatch, tmp_path / "one", f"remote={url}")
    wait_for(lambda: len(published_steps(url)) > is_damaged)
    first.kill()
    first.wait()
    shutil.rmtree(tmp_path / "one")
    steps = published_steps(url)
    if is_damaged:
        remote.write(f"{url}/members/expert-0/checkpoints/{steps[-1]}/trainer.pt", b"garbage")

    _, said = finish(start("fit", tmp_path / "two", f"remote={url}", "member=expert-0", *QUICK))

    assert f"takes over the checkpoint of step {int(steps[-1 - is_damaged][5:13])} from {url}" in said
    assert ("damaged checkpoint (trainer.pt has changed since it was written)" in said) == is_damaged
    assert weights(tmp_path / "two") == weights(finished_run)


def test_several_members_of_one_machine_publish_each_for_itself(store, finished_run, tmp_path, capsys):
    url, _ = store
    shutil.copytree(finished_run / "prepared", tmp_path / "island/prepared")
    finish(start("fit", tmp_path / "island", f"remote={url}"))
    shutil.rmtree(tmp_path / "island")
    capsys.readouterr()

    assert main(["status", *settings(tmp_path / "nowhere"), f"remote={url}", "--json"]) == 0
    found = map(json.loads, capsys.readouterr().out.splitlines())
    assert {one["member"]: (one["step"], one["shown_state"]) for one in found} == {
        member: (steps, "done") for member, steps in STEPS.items()
    }
    assert main(["status", *settings(tmp_path / "nowhere"), f"remote={url}", "--watch"]) == 0
    assert main(["fit", *settings(tmp_path / "again"), f"remote={url}"]) == 0
    for member in MEMBERS:
        assert weights(tmp_path / "again", member) == weights(finished_run, member)


def test_shards_of_several_shapes_are_published_and_trained_from(bucket_run, bucket_finished, tmp_path, quick_prepare):
    given = [*bucket_experiment(bucket_run), f"remote={tmp_path / 'store'}"]
    assert main(["prepare", *given]) == 0
    island = tmp_path / "island"
    assert main(["fit", *given, f"run_dir={island}", "member=expert-0", *QUICK]) == 0

    assert not (island / "prepared" / "shards").exists()
    assert weights(island) == weights(bucket_finished)


def test_a_store_that_is_down_costs_no_step(store, finished_run, tmp_path, monkeypatch):
    url, line = store
    shards = f"island.shards={tmp_path / 'home/prepared/shards'}"
    process = start_slowly(monkeypatch, tmp_path / "one", f"remote={url}", shards, seconds=0.1)
    wait_for(lambda: published_steps(url))
    line.fail(0)
    wait_for(lambda: (tmp_path / "one/members/expert-0/artifact/member.json").exists())
    wait_for(lambda: line.num_failed > 8)  # three attempts, then a line
    line.fail(0, times=0)
    _, said = finish(process)

    assert "expert-0: cannot publish: " in said
    assert remote.read(f"{url}/members/expert-0/artifact/model.safetensors") == weights(finished_run)


def test_a_process_that_was_taken_over_stops_and_publishes_nothing_more(store, tmp_path, monkeypatch):
    url, _ = store
    process = start_slowly(monkeypatch, tmp_path / "one", f"remote={url}")
    wait_for(lambda: published_steps(url))
    lease = remote.read(f"{url}/members/expert-0/lease/1.json")
    remote.write(f"{url}/members/expert-0/lease/2.json", lease)
    _, said = finish(process, code=2)
    before = remote.files(f"{url}/members/expert-0")
    assert said.splitlines()[-1].startswith("error: expert-0: a process on ")
    assert said.splitlines()[-1].endswith(" has taken it over, so it stopped here; nothing is lost")
    assert remote.files(f"{url}/members/expert-0") == before


@pytest.fixture
def publisher(tmp_path, tiny_prepared, monkeypatch):
    """Publishes the first expert of a run that this process has not trained, to a folder."""
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.02)
    run = Run(load_experiment(str(TINY), [f"run_dir={tmp_path / 'run'}", f"remote={tmp_path / 'store'}"]))
    shutil.copytree(tiny_prepared, run.folder.root)
    held = lease.claim("expert-0", f"{run.url}/members/expert-0/lease")
    (run.folder.member("expert-0") / "tensorboard").mkdir(parents=True)
    return Publisher("expert-0", run, held)


def checkpoint(publisher, step, *names):
    """Leave a checkpoint of these files in the member's folder."""
    folder = publisher.folder / f"checkpoints/step-{step:08d}.ckpt"
    folder.mkdir(parents=True)
    for name in ("files.json", *names):
        (folder / name).write_text("{}")
    return folder


def finished_here(publisher, **meta):
    run = publisher.run
    put_artifact(run.folder.artifact("expert-0"), step=run.max_steps("expert-0"), **meta)


@pytest.mark.parametrize(("way", "act"), [("put", Publisher.publish), ("get", Publisher.pull)])
def test_the_heart_beats_during_a_long_transfer(publisher, monkeypatch, way, act):
    (publisher.folder / "tensorboard/events").write_text("one")
    remote.write(f"{publisher.url}/checkpoints/step-00000010.ckpt.1/files.json", b"{}")
    beats = []

    def transfer(*_):
        before = lease.read_lease(publisher.held.url, 1).beat
        wait_for(lambda: beats.append(lease.read_lease(publisher.held.url, 1).beat) or beats[-1] > before + 2, 20)
        raise FileNotFoundError

    publisher.start()
    with monkeypatch.context() as patched:
        patched.setattr(remote, "write", write_directly)
        patched.setattr(remote, way, transfer)
        act(publisher)
    publisher.finish()
    assert beats


def write_directly(url, content):
    Path(url).with_suffix(".new").write_bytes(content)
    Path(url).with_suffix(".new").replace(url)


def test_a_checkpoint_is_published_whole_though_training_removes_it_meanwhile(publisher, monkeypatch):
    folder, put = checkpoint(publisher, 10, "trainer.pt"), remote.put
    monkeypatch.setattr(remote, "put", lambda path, url: (shutil.rmtree(folder, ignore_errors=True), put(path, url)))

    publisher.publish()

    assert set(remote.files(f"{publisher.url}/checkpoints/step-00000010.ckpt.1")) == {"files.json", "trainer.pt"}
    assert {path.name for path in publisher.folder.iterdir()} == {"checkpoints", "tensorboard"}


def test_a_file_that_could_not_be_sent_is_sent_later(publisher, monkeypatch):
    (publisher.folder / "tensorboard/events").write_text("one")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="down"):
        patched.setattr(remote, "put", failing)
        publisher.publish()
    publisher.publish()
    assert remote.read(f"{publisher.url}/tensorboard/events") == b"one"


def failing(*_):
    raise OSError("down")


def test_the_file_that_makes_a_folder_count_goes_last(publisher, monkeypatch):
    sent, put = [], remote.put
    monkeypatch.setattr(remote, "put", lambda path, url: sent.append("/".join(url.split("/")[-2:])) or put(path, url))
    checkpoint(publisher, 30, "a.pt", "trainer.pt")
    finished_here(publisher)

    publisher.publish()

    of_checkpoint = [f"step-00000030.ckpt.1/{name}" for name in ("a.pt", "trainer.pt", "files.json")]
    assert sent == [*of_checkpoint, "artifact/model.safetensors", "artifact/member.json"]


def test_what_a_killed_process_has_half_sent_is_removed(publisher):
    checkpoint(publisher, 30, "trainer.pt")
    there = f"{publisher.url}/checkpoints"
    for stem in ("step-00000010.ckpt.1", "step-00000020.ckpt.0"):  # by steps, whichever process got there
        remote.write(f"{there}/{stem}/files.json", b"{}")
    for stem in ("step-00000025.ckpt.1", "step-00000040.ckpt.2"):  # the second one's process goes on
        remote.write(f"{there}/{stem}/trainer.pt", b"half")

    publisher.publish()

    assert {name.split("/")[0] for name in remote.files(there)} == {
        "step-00000020.ckpt.0",
        "step-00000030.ckpt.1",
        "step-00000040.ckpt.2",
    }


@pytest.mark.parametrize("content", ["[1]", "[" * 200_000, '{"../x": 1}', "7"])
def test_a_published_list_of_files_that_is_none_gives_way(publisher, capsys, content):
    remote.write(f"{publisher.url}/checkpoints/step-00000010.ckpt.1/files.json", content.encode())
    publisher.pull()
    assert "damaged checkpoint (" in capsys.readouterr().err
    assert not list((publisher.folder / "checkpoints").iterdir())


def test_a_published_checkpoint_replaces_damaged_ones_here(publisher, finished_run):
    steps = sorted((finished_run / "members/expert-0/checkpoints").glob("step-*.ckpt"))
    for path in steps:
        shutil.copytree(path, publisher.folder / "checkpoints" / path.name)
        (publisher.folder / "checkpoints" / path.name / "trainer.pt").write_bytes(b"garbage")
    shutil.copytree(steps[0], f"{publisher.url}/checkpoints/{steps[0].name}.1")
    publisher.pull()
    assert find_resumable(publisher.folder / "checkpoints")[0].name == steps[0].name


def test_the_lease_breaks_a_dead_hosts_mark_of_a_disk_that_cannot_lock(publisher):
    lock = publisher.folder / ".lock"
    publisher.held.beat({}, released=True)
    for mark, is_left in ((f"12\n{platform.node()}\n", True), ("12\nfar-away\n", False), ("", True)):
        lock.write_text(mark)
        with published("expert-0", publisher.run):
            assert lock.exists() == is_left
        lock.unlink(missing_ok=True)


def test_only_curves_and_averages_are_sent_and_fetched(publisher):
    folder, snapshot = publisher.folder, "ema/width-0.1-step-00000010.safetensors"
    ours = ("slurm/JOB_submitted.pkl", "wandb/metadata.json", "log.txt", ".tmp-ids.txt")
    shared = {"ids.txt", "csv/metrics.csv", "skipped_steps.jsonl", "tensorboard/events", snapshot}
    for name in (*ours, *shared):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("ours")
    publisher.publish()
    assert {*remote.files(publisher.url)} == {"lease/1.json", *shared}
    for name in ("slurm/JOB_submitted.pkl", "tensorboard/events", "tensorboard/.hidden"):
        remote.write(f"{publisher.url}/{name}", b"theirs")
    newest = Path(publisher.url) / "checkpoints/step-00000010.ckpt.1"
    newest.mkdir(parents=True)
    torch.save({}, newest / "trainer.pt")
    (newest / "files.json").write_text(json.dumps({"trainer.pt": sha256_file(newest / "trainer.pt")}))
    publisher.pull()
    assert (folder / "slurm/JOB_submitted.pkl").read_text() == "ours"
    assert (folder / "tensorboard/events").read_text() == "theirs"
    assert not (folder / "tensorboard/.hidden").exists()
    assert (folder / "checkpoints/step-00000010.ckpt/trainer.pt").exists()
    again = Publisher("expert-0", publisher.run, publisher.held)
    again.pull()
    assert snapshot not in {path.relative_to(folder).as_posix() for path, _ in again._changed()}
    (folder / snapshot).write_text("new!")  # by a resumed training, on a machine that rounds otherwise
    assert folder / snapshot in dict(again._changed())


def test_the_newer_artifact_wins_whether_it_is_here_or_there(publisher, tmp_path):
    there = Path(publisher.url) / "artifact"

    def machine(name):
        return Publisher(
            "expert-0", Run(replace(publisher.run.experiment, run_dir=str(tmp_path / name))), publisher.held
        )

    def make(one, figure):
        finished_here(one, metrics={"figure": figure})

    def figure(folder):
        return json.loads((folder / "member.json").read_text())["metrics"]["figure"]

    def here(one):
        return figure(one.run.folder.artifact("expert-0"))

    first, second = machine("first"), machine("second")
    make(first, 1.0)
    first.publish()
    make(second, 2.0)  # such as another average
    second.publish()
    assert figure(there) == 2

    first.pull()
    first.publish()
    assert (here(first), figure(there)) == (2, 2)

    shutil.rmtree(there)  # such as a damaged one
    first.pull()
    first.publish()
    assert figure(there) == 2

    make(first, 3.0)
    pull_artifact("expert-0", first.run)  # as ``sample`` does; the change could not be sent
    assert here(first) == 3


def test_of_two_artifacts_of_one_step_the_unsent_one_here_stays(publisher):
    own = put_artifact(publisher.run.folder.artifact("expert-0"), step=7)
    before = (own / "member.json").read_bytes()
    for step, is_kept in ((6, True), (7, True), (8, False)):
        put_artifact(Path(publisher.url) / "artifact", step=step, metrics={"figure": 1.0})
        pull_artifact("expert-0", publisher.run)
        assert ((own / "member.json").read_bytes() == before) == is_kept


def test_the_longest_publication_is_remembered(publisher, monkeypatch):
    put, seconds = remote.put, [0.3, 0.0]
    monkeypatch.setattr(remote, "put", lambda *given: time.sleep(seconds[0]) or put(*given))
    for step in (10, 20):
        checkpoint(publisher, step)
        publisher.publish()
        seconds.pop(0)
    assert publisher.publication_seconds >= 0.3


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_stop_without_a_store_is_no_failure_and_an_artifact_is_tried_for_longer(
    publisher, monkeypatch, capsys, is_finished
):
    for name in ("FINAL_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(publish, name, 0 if (name == "FINAL_SECONDS") == is_finished else 1e6)
    (publisher.folder / "tensorboard/events").write_text("one")
    if is_finished:
        finished_here(publisher)
    publisher.start()
    monkeypatch.setattr(remote, "put", failing)
    with within(30):
        if is_finished:
            with pytest.raises(UserError, match="is finished, but its artifact cannot be published: down; repeat"):
                publisher.finish()
            return
        publisher.finish()
    assert "stopped, but its last checkpoint cannot be published: down; repeat the command" in capsys.readouterr().err


def test_an_ensemble_samples_without_a_lost_island(finished_run, tmp_path, capsys, quick_prepare):
    store = tmp_path / "store"
    assert main(["prepare", *settings(tmp_path / "home"), f"remote={store}"]) == 0

    def publish(member):
        shutil.copytree(finished_run / f"members/{member}/artifact", store / f"members/{member}/artifact")

    def sample(folder, *more):
        assert main(["sample", *settings(tmp_path / folder), f"remote={store}", *more]) == 0
        return capsys.readouterr().err

    publish("expert-1")
    publish("router")
    sample("alone", "sample.member=expert-1")
    assert [path.name for path in (tmp_path / "alone/members").iterdir()] == ["expert-1"]
    assert "the artifact of expert-0 is missing" in sample("rest")

    publish("expert-0")
    sample("rest", "--out", str(tmp_path / "all.png"))
    assert (tmp_path / "all.png").read_bytes() == (finished_run / "samples/top-1.png").read_bytes()


def test_bad_remotes_are_one_line(store, tmp_path, capsys):
    url, line = store
    own = settings(tmp_path / "run")
    empty = tmp_path / "empty"
    for command in (["fit", "member=expert-0"], ["sample"]):
        found = refused(capsys, command[0], *own, *command[1:], f"remote={empty}")
        assert found.startswith(f"key 'remote': {empty}: holds no prepared run; start with prepare and the same remote")
    changed = refused(capsys, "fit", *own, "member=expert-0", f"remote={url}", "seed=5")
    assert changed.startswith(f"{url}/experiment.yaml: the experiment changed since this was written: seed (was 0);")
    prepared(tmp_path / "other", "seed=1")
    other = refused(capsys, "prepare", "-c", own[1], f"run_dir={tmp_path / 'other'}", "seed=1", f"remote={url}")
    assert other.startswith(f"{url}/experiment.yaml: the experiment changed since this was written: seed (was 0);")
    assert f"{url.replace('images', 'other')}/probe-" in refused(
        capsys, "prepare", *own, f"remote={url.replace('images', 'other')}"
    )
    newer = remote.read(f"{url}/prepared/manifest.json").replace(b'"format_version": ', b'"format_version": 9')
    remote.write(f"{url}/prepared/manifest.json", newer)
    found = refused(capsys, "fit", *own, "member=expert-0", f"remote={url}")
    assert found.startswith(f"{url}/prepared/manifest.json: key 'format_version' = 9")
    line.fail(0)
    assert refused(capsys, "status", *own, f"remote={url}").startswith(f"key 'remote': {url}/members/expert-0/lease: ")
    assert not (tmp_path / "run").exists()


def test_of_two_preparations_at_one_address_the_later_is_refused(tmp_path, monkeypatch, capsys):
    """The second one ends while the first publishes."""
    url, put, said = tmp_path / "store", remote.put, []
    for seed in (0, 1):
        prepared(tmp_path / str(seed), f"seed={seed}")

    def publish(seed):
        return main(["prepare", *settings(tmp_path / str(seed)), f"seed={seed}", f"remote={url}"])

    def put_slowly(path, address):
        if address.endswith("index.json") and not said:  # of the first one, in the middle
            said.append("")
            assert publish(1) == 2
            said.append(capsys.readouterr().err)
        put(path, address)

    monkeypatch.setattr(remote, "put", put_slowly)
    assert publish(0) == 0
    assert said[1].startswith(
        f"error: {url}/prepared/publishing.json: other data are being published here, or were in "
    )
    assert publish(1) == 2 and publish(0) == 0
    assert "\nseed: 0\n" in (url / "experiment.yaml").read_text()
    assert (url / "prepared/manifest.json").read_bytes() == (tmp_path / "0/prepared/manifest.json").read_bytes()
    assert hashes(url / "prepared/shards") == hashes(tmp_path / "0/prepared/shards")


def test_a_record_of_initial_weights_is_at_the_store_only_with_all_that_it_names(
    tmp_path, monkeypatch, quick_prepare, finished_run
):
    """An island may look at any moment of the publication."""
    here, there, put, seen = tmp_path / "run/initial", tmp_path / "store/initial", remote.put, []

    def put_and_look(path, url):
        put(path, url)
        for record in there.glob("*.json"):
            sha256 = json.loads(record.read_text())["sha256"]
            assert hashes(there / sha256) == hashes(here / sha256)
            seen.append(record.name)

    monkeypatch.setattr(remote, "put", put_and_look)
    start = [f"expert.init_from={finished_run / 'members/expert-0/artifact'}", f"remote={tmp_path / 'store'}"]
    assert main(["prepare", *settings(tmp_path / "run"), *start]) == 0
    assert {*seen} == {path.name for path in here.glob("*.json")} and seen


def test_prepare_publishes_once_per_address(tmp_path, monkeypatch, quick_prepare):
    seen, put = [], remote.put
    monkeypatch.setattr(remote, "put", lambda path, url: (seen.append(url), put(path, url)))
    for place, is_new in (("a", True), ("a", False), ("b", True)):
        seen.clear()
        assert main(["prepare", *settings(tmp_path / "run"), f"remote=file://{tmp_path / place}"]) == 0
        sent = [url for url in seen if "/probe-" not in url]
        assert bool(sent) == is_new
        assert not is_new or sent[-1].endswith("/prepared/manifest.json")
    for place in ("a", "b"):
        assert hashes(tmp_path / place / "prepared/shards") == hashes(tmp_path / "run/prepared/shards")
