"""Runs of tables."""

from __future__ import annotations

import pytest
from run_tables import RunTable


@pytest.fixture
def run_table() -> RunTable:
    """Runs a table with a fake backend."""
    return RunTable()
