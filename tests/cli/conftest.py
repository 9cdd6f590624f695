"""Commands in this process, and what they print."""

import pytest
from tiny_runs import copy_run

from ddm_lightning.cli.parser import main


@pytest.fixture
def called(capsys):
    """Runs a command that ends well; what it prints to stdout."""

    def call(*arguments):
        capsys.readouterr()
        code = main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert code == 0, (code, out, err)
        return out

    return call


@pytest.fixture
def refuse(capsys):
    """Runs a command that has to be refused at once; its only line on stderr."""

    def call(*arguments):
        capsys.readouterr()
        code = main([*map(str, arguments)])
        out, err = capsys.readouterr()
        assert code == 2, (code, out, err)
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return call


@pytest.fixture
def run(finished_run, tmp_path):
    """A copy of the finished run."""
    return copy_run(finished_run, tmp_path / "run")
