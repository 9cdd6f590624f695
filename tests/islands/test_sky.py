"""Members as a job group of SkyPilot: the file, what is started and stopped, and SkyPilot's own opinion of both."""

import json
import os
import shutil
import socket
import subprocess
import venv

import pytest
import yaml
from islands.watching import launch
from shards.mds import WARNINGS
from tiny_runs import TINY, prepared

from ddm_lightning.cli.parser import main
from ddm_lightning.core.errors import UserError
from ddm_lightning.islands.launchers.sky import SkyLauncher

pytestmark = [*WARNINGS, pytest.mark.slow]
MEMBERS = ["expert-0", "expert-1", "router"]
SETTINGS = {
    "accelerators": ["H100", "A100-80GB"],
    "infra": "aws/us-east-1",
    "setup": "pip install -e .",
    "secrets": ["STORE_KEY"],
    "more": {"resources": {"disk_size": 512}},
}
RECOVERY = {"strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 3, "recover_on_exit_codes": [130]}
# Copies what it is told, and answers as SkyPilot 0.14 does.
STAND_IN = """#!/bin/sh
echo "$@" >> "$0.log"
[ "$2" != queue ] || { echo "[notice] starts a server"; cat "$0.json"; echo; echo "[hint] see the docs"; }
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The arguments of a launch by SkyPilot; none is on the path."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("STORE_KEY", "s3cr3t")
    own = ["-c", str(TINY), f"run_dir={tmp_path / 'run'}", f"remote={tmp_path / 'store'}"]
    return [*own, "--on", "sky", f"launch.sky={json.dumps(SETTINGS)}", "islands.expert-1.devices=8"]


def handles(tmp_path):
    return {name: handle for name, (_, handle) in json.loads((tmp_path / "run/launched.json").read_text()).items()}


def task(run, member, devices):
    """The member's document of the file."""
    command = ["fit", *run[:4], *run[6:], f"member={member}"]
    return {
        "name": member,
        "workdir": ".",
        "resources": {
            "use_spot": True,
            "job_recovery": RECOVERY,
            "accelerators": {"H100": devices, "A100-80GB": devices},
            "infra": "aws/us-east-1",
            "disk_size": 512,
        },
        "envs": {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        "secrets": {"STORE_KEY": None},
        "setup": "pip install -e .",
        "run": ".venv/bin/python -m ddm_lightning " + " ".join(f"'{w}'" if "{" in w else w for w in command),
    }


def test_the_file_is_one_group_without_a_network(run, tmp_path, capsys):
    assert main(["launch", *run, "--dry-run"]) == 0
    header, *tasks = yaml.safe_load_all(capsys.readouterr().out)
    assert header == {"name": "tiny_2x", "execution": "parallel", "inter_connection": False}
    assert tasks == [task(run, name, 8 if name == "expert-1" else 1) for name in MEMBERS]
    assert not (tmp_path / "run").exists()


def test_what_does_not_fit_is_said_before_it_is_rented(run, capsys):
    assert main(["launch", *run, "--dry-run", "expert.train.global_batch_size=8388608"]) == 0
    assert "note: expert-0 on H100 80GB: does not fit: " in capsys.readouterr().err


def test_a_group_is_started_once_and_stopped_as_a_whole(run, tmp_path, capsys):
    prepared(tmp_path / "run", run[3])
    assert main(["launch", *run]) == 2
    assert "needs SkyPilot; install it with: pip install" in capsys.readouterr().err
    assert not (tmp_path / "run/sky").exists()

    sky = tmp_path / "bin" / "sky"
    sky.parent.mkdir()
    sky.write_text(STAND_IN.replace("cat", shutil.which("cat", path=os.defpath)))
    sky.chmod(0o755)
    assert launch(capsys, run) == [f"{name}: started" for name in MEMBERS]
    (file,) = (tmp_path / "run/sky").iterdir()
    assert sky.with_suffix(".log").read_text() == f"jobs launch --yes --detach-run --secret STORE_KEY {file}\n"
    assert "s3cr3t" not in file.read_text()
    first = handles(tmp_path)

    states = {"expert-0": "RUNNING", "expert-1": "RECOVERING", "router": "FAILED_SETUP"}
    queue = [{"job_name": file.stem, "task_name": name, "status": state} for name, state in states.items()]
    sky.with_suffix(".json").write_text(json.dumps(queue, indent=2))
    assert launch(capsys, run) == ["expert-0: queued", "expert-1: queued", "router: started"]
    assert handles(tmp_path)["expert-0"] == first["expert-0"]
    assert handles(tmp_path)["router"] != first["router"]

    assert main(["launch", *run, "--cancel", "--only", "expert-0"]) == 2
    assert f"stop these members, too: {file.stem}/expert-1" in capsys.readouterr().err
    assert launch(capsys, run, "--cancel") == ["expert-0: stopped", "expert-1: stopped", "router: not running"]
    assert sky.with_suffix(".log").read_text().splitlines()[-1] == f"jobs cancel --yes --name {file.stem}"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo '[]'", False),
        ("echo 'No in-progress managed jobs.'", False),
        ("echo 'No in-progress managed jobs.' >&2; exit 1", False),
        ("echo '[1] is the newest'; echo 'a table'", UserError),
        ("echo broken >&2; exit 1", UserError),
    ],
)
def test_only_skypilot_says_that_nothing_runs(run, tmp_path, script, expected):
    sky = tmp_path / "bin" / "sky"
    sky.parent.mkdir()
    sky.write_text(f"#!/bin/sh\n{script}\n")
    sky.chmod(0o755)
    if expected is UserError:
        with pytest.raises(UserError, match="sky jobs queue: "):
            SkyLauncher().is_active("group/expert-0")
    else:
        assert SkyLauncher().is_active("group/expert-0") is expected


# Runs beside SkyPilot, which has an environment of its own.
JUDGE = """
import json, sys
import sky.jobs.recovery_strategy
from sky.jobs import state
from sky.utils import common_utils, dag_utils, registry

group = dag_utils.load_dag_from_yaml(sys.argv[1], secrets_overrides=[("STORE_KEY", "s3cr3t")])
job = state.set_job_info_without_job_id(
    group.name, "default", "", None, None, common_utils.get_user_hash(), execution="parallel"
)
for number, task in enumerate(group.tasks):
    state.set_pending(job, number, task.name, "", "{}")
print(json.dumps({
    "is_group": group.is_job_group(),
    "network": group.inter_connection,
    "strategies": list(registry.JOBS_RECOVERY_STRATEGY_REGISTRY.keys()),
    "tasks": [task.to_yaml_config() for task in group.tasks],
}))
"""


@pytest.mark.long
def test_skypilot_reads_the_file_as_meant_and_knows_its_tasks(run, tmp_path, capsys, monkeypatch):
    with socket.socket() as port:
        if port.connect_ex(("127.0.0.1", 46580)) == 0:
            pytest.skip("a server of SkyPilot runs here, which is not the test's")
    venv.create(tmp_path / "sky", with_pip=True)
    python, bin_ = tmp_path / "sky/bin/python", tmp_path / "sky/bin"
    if subprocess.run([python, "-m", "pip", "install", "-q", "skypilot==0.14.1"], check=False).returncode:
        pytest.skip("SkyPilot cannot be installed here")
    monkeypatch.setenv("PATH", os.pathsep.join([str(bin_), os.defpath]))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".sky").mkdir()
    (tmp_path / ".sky/config.yaml").write_text("jobs: {controller: {consolidation_mode: true}}")
    prepared(tmp_path / "run", run[3])

    # No cloud is in reach, so SkyPilot refuses at the last step; what it would have noted is noted by hand.
    assert main(["launch", *run]) == 2
    assert "error: sky jobs launch: " in capsys.readouterr().err.splitlines()[-1]
    (file,) = (tmp_path / "run/sky").iterdir()
    found = subprocess.run([python, "-c", JUDGE, file], check=True, capture_output=True, text=True).stdout
    found = json.loads(found.splitlines()[-1])
    (tmp_path / "run/launched.json").write_text(json.dumps({name: ["sky", f"{file.stem}/{name}"] for name in MEMBERS}))

    try:
        assert found["is_group"]
        assert not found["network"]
        assert RECOVERY["strategy"].lower() in found["strategies"]
        for one, member in zip(found["tasks"], MEMBERS, strict=True):
            expected = task(run, member, 8 if member == "expert-1" else 1)
            resources, both = expected.pop("resources"), one.pop("resources")["any_of"]
            each = [{**resources, "accelerators": {k: n}} for k, n in resources.pop("accelerators").items()]
            assert sorted(both, key=str) == sorted(each, key=str)
            expected["secrets"] = {"STORE_KEY": "s3cr3t"}
            assert {key: one[key] for key in expected} == expected
            assert set(one) - set(expected) == {"num_nodes", "file_mounts", "volumes", "_user_specified_yaml"}
        assert launch(capsys, run) == [f"{name}: queued" for name in MEMBERS]
        assert main(["launch", *run, "--cancel", "--only", "router"]) == 2
        assert launch(capsys, run, "--cancel") == [f"{name}: stopped" for name in MEMBERS]
        assert launch(capsys, run, "--cancel") == [f"{name}: not running" for name in MEMBERS]
    finally:
        subprocess.run(["sky", "api", "stop"], check=False)
