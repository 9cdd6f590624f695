"""The run-time type checker of the tests, named in conftest.py."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

# An int where a float is annotated is right by PEP 484, and wrong by beartype's default.
check_types = beartype(conf=BeartypeConf(is_pep484_tower=True))
