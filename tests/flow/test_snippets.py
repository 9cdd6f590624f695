"""The examples in docstrings run and print what they show."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["path", "solvers", "oracle", "randomness"])
def test_snippets_run(name):
    failed, tried = doctest.testmod(importlib.import_module(f"ddm_lightning.flow.{name}"))
    assert tried and not failed
