"""Members launched on this machine, by ssh and on SLURM: started once, stopped with a checkpoint, resumed."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from artifact_files import put
from islands.watching import launch, refused, wait_for, weights
from sample_log import python_path
from shards import servers
from shards.mds import WARNINGS
from tiny_runs import ROOT, SETTINGS, TINY, prepared, read_status

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.config.merge import island_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.islands import launch as launching
from ddm_lightning.islands.job import Job, Launcher
from ddm_lightning.islands.launch import cancel, jobs_of
from ddm_lightning.islands.launch import launch as launch_jobs
from ddm_lightning.islands.launchers.local import LocalLauncher
from ddm_lightning.islands.launchers.slurm import SlurmLauncher
from ddm_lightning.islands.launchers.ssh import SshLauncher
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import MemberStatus

pytestmark = [*WARNINGS, pytest.mark.slow]
LONG = ("expert.train.max_steps=1200", "island.checkpoint_every_n_steps=1000")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The arguments of a run that is prepared and published in a folder."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'data'}:{python_path()}")
    return ["-c", str(TINY), f"run_dir={tmp_path / 'run'}", f"remote={tmp_path / 'store'}"]


def stops_and_resumes(run, tmp_path, capsys, on, *more):
    """Launch one expert, look twice, stop it in mid-training, launch it again."""
    own = [*more, "--on", on, "--only", "expert-0"]

    def wait_until(state):
        wait_for(lambda: read_status(tmp_path / "run", "expert-0").get("state") == state)

    assert launch(capsys, run, *own) == ["expert-0: started"]
    wait_until("training")
    assert launch(capsys, run, *own)[0] in ("expert-0: running", "expert-0: queued")
    assert launch(capsys, run, *own, "--cancel") == ["expert-0: stopped"]
    wait_until("stopped")
    wait_for(lambda: launch(capsys, run, *own, "--cancel") == ["expert-0: not running"])

    os.environ.pop("STEP_SECONDS", None)
    assert launch(capsys, run, *own) == ["expert-0: started"]
    wait_for(lambda: (tmp_path / "store/members/expert-0/artifact/member.json").exists())
    wait_for(lambda: launch(capsys, run, *own) == ["expert-0: finished"])


def test_on_this_machine(run, tmp_path, capsys, monkeypatch, finished_run):
    prepared(tmp_path / "run", *run[3:], *SETTINGS)
    monkeypatch.setenv("STEP_SECONDS", "1")

    stops_and_resumes(run, tmp_path, capsys, "local", *SETTINGS)

    assert weights(tmp_path / "store") == weights(finished_run)


def is_undisturbed_elsewhere(run, tmp_path, capsys, *more):
    """Whether a training by an engine gives the bits of an undisturbed one."""
    prepared(tmp_path / "run", *run[3:], *LONG)
    stops_and_resumes(run, tmp_path, capsys, *more, *LONG)
    shutil.copytree(tmp_path / "run" / "prepared", tmp_path / "plain" / "prepared")
    assert main(["fit", "-c", str(TINY), f"run_dir={tmp_path / 'plain'}", "member=expert-0", *LONG]) == 0
    return weights(tmp_path / "store") == weights(tmp_path / "plain")


@pytest.mark.long
def test_on_a_host_by_ssh(run, tmp_path, capsys, monkeypatch):
    with servers.sftp(tmp_path, tmp_path, monkeypatch) as (url, line):
        host = url.partition("://")[2].partition(":")[0]
        options = f"-p {line.port} -i {tmp_path / 'user'} -o UserKnownHostsFile={tmp_path / 'known'} -o BatchMode=yes"
        ssh = {"hosts": {"expert-0": host}, "folder": str(ROOT), "python": sys.executable, "options": options}
        assert is_undisturbed_elsewhere(run, tmp_path, capsys, "ssh", f"launch.ssh={json.dumps(ssh)}")


@pytest.mark.slurm
def test_on_slurm(run, tmp_path, capsys):
    assert is_undisturbed_elsewhere(run, tmp_path, capsys, "slurm", "launch.slurm.cpus_per_device=1")


def test_a_job_of_slurm_has_the_nodes_devices_and_limits_of_its_island(tmp_path, monkeypatch):
    told = {}

    class Executor:
        def __init__(self, **given):
            told.update(given)

        update_parameters = __init__

        def submit(self, training):
            told["command"] = training.command[1:]
            return SimpleNamespace(job_id=7)

    monkeypatch.setattr("submitit.AutoExecutor", Executor)
    island = IslandConfig("gpu", devices=4, nodes=2, num_threads=5)
    job = Job("expert-0", "run", ("fit", "member=expert-0"), island, tmp_path)
    launcher = SlurmLauncher("long", minutes=90, cpus_per_device=3, memory_gb=64.0, notice_seconds=33)

    assert launcher.submit(job) == "7"
    assert told.pop("slurm_max_num_timeout") > 1000
    assert told == {
        "folder": tmp_path / "slurm",
        "cluster": "slurm",
        "name": "run-expert-0",
        "nodes": 2,
        "tasks_per_node": 1,
        "timeout_min": 90,
        "cpus_per_task": 12,
        "slurm_signal_delay_s": 33,
        "slurm_setup": ["export OMP_NUM_THREADS=5", "export PYTHONUNBUFFERED=1"],
        "slurm_additional_parameters": {},
        "gpus_per_node": 4,
        "mem_gb": 64.0,
        "slurm_partition": "long",
        "command": ["-m", "ddm_lightning", "fit", "member=expert-0"],
    }


class Listed(Launcher):
    """Starts nothing; all it was given before runs."""

    def __init__(self):
        self.given = []

    def submit(self, job):
        self.given.append(job.member)
        return f"number {len(self.given)}"

    def is_active(self, handle):
        return handle == f"number {len(self.given)}"

    def cancel(self, handle):
        pass


def run_and_jobs(tmp_path, *more):
    """A run whose members are seen in its folder, and the jobs of its first expert and its router."""
    given = [f"run_dir={tmp_path}", *more]
    shared = Run(load_experiment(TINY, [*given, f"remote={tmp_path / 'store'}"]))
    return Run(load_experiment(TINY, given)), jobs_of(shared, ["expert-0", "router"], "FILE", [])


def test_a_finished_member_is_started_once_it_is_to_take_more_steps(tmp_path):
    launcher, said = Listed(), []
    for max_steps, on in ((6, "a"), (7, "a"), (8, "a"), (8, "a"), (8, "b")):
        run, (job, _) = run_and_jobs(tmp_path, f"expert.train.max_steps={max_steps}")
        put(run.folder.artifact("expert-0"), step=7)
        said.append(launch_jobs(run, [job], launcher, on)["expert-0"])

    assert said == ["finished", "finished", "started (number 1)", "queued", "started (number 2)"]


def test_a_member_has_its_number_whoever_else_is_launched(tmp_path):
    run = Run(load_experiment(TINY, [f"remote={tmp_path}"]))

    assert [job.number for job in jobs_of(run, ["router", "expert-1"], "FILE", [])] == [2, 1]


@pytest.mark.parametrize(
    ("state", "expected", "other"),
    [("starting", "running", 1), ("training", "running", 1), ("stopped", "started (number 1)", 2)],
)
def test_a_member_that_starts_or_trains_is_not_started_again(tmp_path, state, expected, other):
    run, jobs = run_and_jobs(tmp_path)
    run.folder.member("expert-0").mkdir(parents=True)
    MemberStatus("expert-0", 60, state).write(run.folder.member("expert-0"))

    assert launch_jobs(run, jobs, Listed(), "a") == {"expert-0": expected, "router": f"started (number {other})"}


def test_each_launcher_is_asked_for_its_own_jobs_alone(tmp_path, monkeypatch):
    handles = {"expert-0": ["a", "a0"], "expert-1": ["b", "b1"], "router": ["a", "a2"]}
    (tmp_path / "launched.json").write_text(json.dumps(handles))
    stopped = []

    class Own(Listed):
        def __init__(self, name):
            self.handles = rf"{name}\d"

        def is_active(self, handle):
            return handle != "a2"

        def cancel(self, handle):
            stopped.append((self.handles[0], handle))

    monkeypatch.setattr(launching, "build_launcher", lambda name, _: Own(name))
    run = Run(load_experiment(TINY, [f"run_dir={tmp_path}"]))
    assert dict(cancel(run, ["expert-0", "expert-1", "router"])) == {
        "expert-0": "stopped (a0)",
        "expert-1": "stopped (b1)",
        "router": "not running (a2)",
    }
    assert stopped == [("a", "a0"), ("b", "b1")]


def test_a_dry_run_prints_the_jobs(run, tmp_path, capsys):
    assert main(["launch", *run, "--on", "local", "--dry-run", "islands={router: {num_threads: 3}}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line)[-1] for line in lines] == ["member=expert-0", "member=expert-1", "member=router"]
    assert [line.startswith("OMP_NUM_THREADS=3 ") for line in lines] == [False, False, True]
    assert not (tmp_path / "run").exists()


def test_a_password_is_in_no_job_and_no_record(run, tmp_path, capsys):
    secret = "remote=sftp://me:s3cret@127.0.0.1:1/x"
    assert main(["launch", *run, secret, "--on", "local", "--dry-run"]) == 0
    assert main(["fit", *run, secret, "member=expert-0"]) == 2  # refused by the host
    shown = capsys.readouterr()
    assert "remote=sftp://me@127.0.0.1:1/x" in shown.out and "s3cret" not in shown.out + shown.err
    Run.open(load_experiment(TINY, [f"run_dir={tmp_path / 'run'}", secret]), create=True)
    assert "sftp://me@127.0.0.1:1/x" in (record := (tmp_path / "run/experiment.yaml").read_text())
    assert "s3cret" not in record and os.environ["DDM_PASSWORD_ME_127_0_0_1"] == "s3cret"


def test_an_island_has_the_settings_of_its_kind_and_of_its_own():
    changes = "islands={expert: {num_threads: 2, precision: bf16-mixed}, expert-1: {num_threads: 4}}"
    experiment = load_experiment(TINY, [changes])
    found = {name: island_of(name, experiment) for name in ("expert-0", "expert-1", "router")}
    assert {name: (one.num_threads, one.precision) for name, one in found.items()} == {
        "expert-0": (2, "bf16-mixed"),
        "expert-1": (4, "bf16-mixed"),
        "router": (1, "32-true"),
    }


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--on", "slurm"], "expert-0: SLURM refuses the job: "),
        (["--on", "ssh", "launch.ssh={hosts: {expert-0: me@127.0.0.1}, options: -p 1}"], "ssh me@127.0.0.1: "),
    ],
)
def test_an_engine_out_of_reach_is_one_line(run, tmp_path, capsys, monkeypatch, more, words):
    prepared(tmp_path / "run", *run[3:])
    if "slurm" in more:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert refused(capsys, "launch", *run, *more, "--only", "expert-0").startswith(words)


# A host's shell whose start-up prints, in another encoding and without a line's end.
SSH = """#!/bin/sh
echo "$@" >> "$0.log"
for last; do before=$host; host=$command; command=$last; done
[ "$host" != down ] || { echo "ssh: connect to host down: No route to host" >&2; exit 255; }
printf '\\033[1mWelcome\\351\\n4711\\nmail: '
sh -c "$command" || exit
echo bye
"""
SQUEUE = """#!/bin/sh
echo "The cluster is down on Friday"
case "$*" in *"--jobs 4711"*) echo 4711 ;; esac
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a stand-in for a program on the path."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def write(name, text):
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
        return path.with_suffix(".log")

    return write


def test_a_shell_that_prints_lines_of_its_own_hides_no_answer(tmp_path, program):
    program("ssh", SSH)
    program("python", f"#!{sys.executable}\nimport time\ntime.sleep(120)\n")
    launcher = SshLauncher(hosts={"expert-0": "node"}, folder=str(tmp_path), python="python")
    job = Job("expert-0", "run", ("fit",), IslandConfig(), tmp_path / "expert-0")

    handle = launcher.submit(job)
    assert launcher.is_active(handle)

    launcher.cancel(handle)
    wait_for(lambda: not launcher.is_active(handle))


def test_a_host_without_the_interpreter_starts_nothing(tmp_path, program):
    program("ssh", SSH)
    launcher = SshLauncher(hosts={"expert-0": "node"}, folder=str(tmp_path), python="~/venv/bin/python")
    job = Job("expert-0", "run", ("fit",), IslandConfig(), tmp_path / "expert-0")

    with pytest.raises(UserError, match=r"ssh node: .*~/venv/bin/python: not found"):
        launcher.submit(job)
    assert not job.folder.exists()


def test_a_process_that_only_has_the_members_number_is_left_alone(program):
    program("ssh", SSH)
    with subprocess.Popen(["sleep", "60"]) as other:
        assert not SshLauncher().is_active(f"node {other.pid}")
        other.kill()


def test_a_system_that_does_not_say_when_a_process_began_has_its_number():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert LocalLauncher().is_active(f"{process.pid} ")
        process.kill()
    assert not LocalLauncher().is_active(f"{process.pid} ")


def test_a_shell_that_runs_no_command_is_no_answer(program):
    program("ssh", "#!/bin/sh\necho This account is not available.\n")
    with pytest.raises(UserError, match="ssh node: its shell did not run the command; check"):
        SshLauncher().is_active("node 4711")


def test_a_queue_that_prints_lines_of_its_own_holds_only_its_jobs(program):
    program("squeue", SQUEUE)
    launcher = SlurmLauncher()
    assert [launcher.is_active(handle) for handle in ("4711", "4712")] == [True, False]


def launched(tmp_path, text):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/launched.json").write_text(text)


def test_a_member_whose_host_is_out_of_reach_may_still_run(run, tmp_path, capsys, program):
    program("ssh", SSH)
    with subprocess.Popen(["sh", "-c", "sleep 60; : ddm_lightning"], start_new_session=True) as member:
        launched(tmp_path, json.dumps({"expert-0": ["ssh", "down 1"], "expert-1": ["ssh", f"up {member.pid}"]}))
        assert main(["launch", *run, "--cancel"]) == 2
        assert member.wait() == -signal.SIGTERM
        os.killpg(member.pid, signal.SIGKILL)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"expert-1: stopped (up {member.pid})",
        "router: not running (no job of this run folder)",
    ]
    assert err.startswith("error: expert-0 may still run: ssh down: ssh: connect to host down: No route to host; ")


def test_a_host_that_has_died_can_be_replaced(run, tmp_path, capsys, program, quick_prepare):
    log = program("ssh", SSH)
    prepared(tmp_path / "run", *run[3:])
    (tmp_path / "run/launched.json").write_text(json.dumps({"expert-0": ["ssh", "down 1"]}))
    hosts = f"launch.ssh={{hosts: {{expert-0: up}}, folder: '{tmp_path}', python: 'true'}}"
    assert launch(capsys, run, "--on", "ssh", "--only", "expert-0", hosts) == ["expert-0: started"]
    assert [line.split()[4] for line in log.read_text().splitlines()] == ["down", "up"]


@pytest.mark.parametrize(
    "text",
    [
        '{"expert-0": ["ssh", "-oProxyCommand=id 1"]}',
        '{"expert-0": ["ssh", "up 1; id"]}',
        '{"expert-0": ["slurm", "--me"]}',
        '{"expert-0": ["local", "some number"]}',
        '{"expert-0": ["sky", "--all/expert-0"]}',
        '{"expert-0": ["moon", "1"]}',
        '{"expert-0": "1"}',
        '{"expert-0": ["ssh", 1]}',
        '["expert-0"]',
        "{",
    ],
)
def test_forged_handles_reach_no_program(run, tmp_path, capsys, program, text):
    logs = [program(name, SSH) for name in ("ssh", "squeue", "scancel", "sky")]
    launched(tmp_path, text)

    refused(capsys, "launch", *run, "--cancel", "--only", "expert-0")
    assert not any(log.exists() for log in logs)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--on", "moon"], "unknown launcher 'moon'; known: local, "),
        ([], "launch: --on is missing; known: local, "),
        (["--on", "local", "remote=null"], "key 'remote' is null: islands share nothing else; set remote="),
        (["--on", "local", "--only", "expert-9"], "--only=expert-9: unknown member 'expert-9'; known: expert-0, "),
        (["--on", "ssh"], "key 'launch.ssh.hosts': none for expert-0; add expert-0: USER@HOST, or use --only"),
        (
            ["--on", "ssh", "launch.ssh.options='-i \"my key'"],
            "launcher 'ssh' refuses its params: No closing quotation",
        ),
        (["--on", "sky", "launch.sky.accelerators=H100"], "launcher 'sky': key 'params.accelerators': must be a list"),
        (
            ["--on", "sky", "launch.sky.secrets=[KEY=value]"],
            "key 'params.secrets' = ['KEY=value']: must be a list, each the name of a variable",
        ),
        (["--on", "local", "launch.local.hosts=3"], "launcher 'local' has no parameter 'hosts'; it takes: none"),
        (
            ["--on", "local", "islands.router.nodes=2"],
            "key 'island.nodes' = 2 of router: --on local gives a member one ",
        ),
        (["--on", "local", "islands.expert-7.devices=2"], "key 'islands.expert-7': there is no such member or role"),
        (["--on", "local", "islands.router.device=2"], "unknown key 'islands.router.device'"),
        (["--on", "local", "islands.router.devices=0"], "key 'islands.router.devices' = 0"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, capsys, more, words):
    assert words in refused(capsys, "launch", *run, *more, "--dry-run")
