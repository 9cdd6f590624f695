"""What makes ``prepare`` quick enough to be run many times."""

from __future__ import annotations

import os

import pytest

from ddm_lightning.prepare.report import page


@pytest.fixture
def quick_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without charts, and no waiting for the disk: together nine tenths of the time of a tiny run."""

    def write_report(folder, *_, **__):
        folder.mkdir(exist_ok=True)
        (folder / "report.html").write_text("a light stand-in")

    monkeypatch.setattr(page, "write_report", write_report)
    monkeypatch.setattr(os, "fsync", lambda _: None)
