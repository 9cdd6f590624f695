"""Unused: goes when the start time of a process is read in one place."""

from __future__ import annotations

from pathlib import Path


def _born(pid: int) -> str | None:
    """When a process was started, in its machine's clock ticks since that was booted; None for no such process."""
    try:
        # Behind the name of the program, which may hold anything: field 22 of proc(5).
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (FileNotFoundError, ProcessLookupError):
        return None
