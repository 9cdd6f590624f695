"""Variables that others have set: of launchers, operators of clusters, schedulers, notebooks and terminals."""

import os
import subprocess
import sys

import pytest
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.core.environment import Ranks, enter, place_of
from ddm_lightning.core.errors import UserError

MEETING = {"MASTER_ADDR": "node-0", "MASTER_PORT": "23456"}
TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1", **MEETING}
NAMES = (*TORCHRUN, "NODE_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")


@pytest.fixture
def variables(monkeypatch):
    """Set variables of ranks and nodes, and no others."""

    def set_all(**values):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_torchrun_numbers_ranks(variables):
    variables(**TORCHRUN)
    enter()
    assert Ranks.read() == Ranks(5, 1, 8, 4, 1, True)
    assert all(os.environ[name] == value for name, value in TORCHRUN.items())


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"WORLD_SIZE": "4"},
        {"RANK": "2", "WORLD_SIZE": "4", **MEETING},
        {"RANK": "one", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
        {"RANK": "4", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
        {"RANK": "-1", "LOCAL_RANK": "0", "WORLD_SIZE": "4"},
        {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "4"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMI_RANK": "1", "SLURM_PROCID": "1"},
    ],
)
def test_what_is_no_whole_set_does_not_count_and_is_not_handed_on(variables, found):
    variables(**found)
    assert Ranks.read() == Ranks()
    enter()
    assert Ranks.read() == Ranks()
    assert not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} & os.environ.keys()


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"NODE_RANK": "1", **MEETING}, (1, "node-0:23456")),
        ({"NODE_RANK": "0", "MASTER_ADDR": "node-0"}, (0, "node-0:29500")),
        (TORCHRUN, (1, "node-0:23456")),
        ({"RANK": "1", "WORLD_SIZE": "2", **MEETING}, (1, "node-0:23456")),  # a pod of an operator's
        # Given by hand within an allocation of another size.
        ({"NODE_RANK": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", **MEETING}, (1, "node-0:23456")),
        (
            {
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NODELIST": "gpu[07-08]",
                "SLURM_JOB_ID": "1234567",
            },
            (1, "gpu07:19567"),
        ),
    ],
)
def test_a_node_finds_its_place(variables, found, expected):
    variables(**found)
    enter()
    assert place_of(1) == (0, "")
    assert place_of(2) == expected


@pytest.mark.parametrize(
    "found", [{}, {"NODE_RANK": "1"}, {"NODE_RANK": "two", **MEETING}, {"NODE_RANK": "2", **MEETING}]
)
def test_a_node_without_a_place_is_one_line(variables, found):
    variables(**found)
    with pytest.raises(UserError, match="which node is this"):
        place_of(2)


@pytest.mark.parametrize("columns", ["0", "wide"])
def test_a_terminal_of_no_width_is_none(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    enter()
    assert "COLUMNS" not in os.environ
    monkeypatch.setenv("COLUMNS", "66")
    enter()
    assert os.environ["COLUMNS"] == "66"


BACKEND = """
import os, sys
from ddm_lightning.core.environment import import_matplotlib
import_matplotlib()
import matplotlib.pyplot
print(matplotlib.get_backend(), os.environ["MPLBACKEND"])
matplotlib.pyplot.switch_backend("ps")
import_matplotlib()
print(matplotlib.get_backend())
"""


@pytest.mark.parametrize(("backend", "expected"), [("svg", "svg"), ("nonsense", "agg")])
def test_a_notebook_keeps_its_backend_unless_it_is_unknown_here(backend, expected):
    environment = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run([sys.executable, "-c", BACKEND], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected, backend, "ps"]


def test_commands_and_their_children_draw_whatever_backend_a_notebook_has(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    assert main(["config", "-c", str(TINY)]) == 0
    assert os.environ["MPLBACKEND"] == "agg"


def test_the_package_lists_what_it_imports_late():
    command = "import ddm_lightning, sys; assert 'torch' not in sys.modules; print(*dir(ddm_lightning))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert {"DecentralizedEnsemble", "UserError"} <= {*done.stdout.split()}


def test_a_folder_that_has_been_removed_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["status", "-c", str(TINY)]) == 2
    assert capsys.readouterr().err == "error: the current folder has been removed; change to another\n"
