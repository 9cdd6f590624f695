"""A function in a forked process, which has imported all that this one has."""

import multiprocessing
import os
import sys
import tempfile


def _child(work, variables, out, err):
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(variables)
    tempfile.tempdir = None  # else it stays the parent's
    work()


class Forked:
    """Runs ``work`` with these environment variables; ``folder`` is for what it prints."""

    def __init__(self, work, folder, **variables):
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._err = folder / "out", folder / "err"
        arguments = (work, variables, self._out, self._err)
        self.process = multiprocessing.get_context("fork").Process(target=_child, args=arguments)
        self.process.start()

    def finish(self, seconds=240):
        """Exit code, and what was printed to either stream."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            raise TimeoutError(f"still runs after {seconds} s: {self._out.read_text()}{self._err.read_text()}")
        return self.process.exitcode, self._out.read_text(), self._err.read_text()
