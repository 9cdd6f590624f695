"""The examples in docstrings run and print what they show."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["flow.path", "flow.solvers", "flow.oracle", "flow.randomness", "networks.dit"])
def test_snippets_run(name):
    failed, tried = doctest.testmod(importlib.import_module(f"ddm_lightning.{name}"))
    assert tried and not failed
