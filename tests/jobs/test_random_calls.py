"""Random sequences of calls, of starts and stops of workers, and of jumps of the clock, against a simple model.

The workers' threads are real, so no two runs of an example are quite equal.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from random_calls import RandomCalls
from random_parts import LEASE_S

from batchline.jobs import worker
from batchline.jobs.options import JobsOptions
from batchline.jobs.state_folder import state_in


@pytest.mark.thorough
def test_random_calls_bring_every_batch_to_a_legal_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="batchline")
    monkeypatch.setattr(worker, "POLL_S", 0.01)
    monkeypatch.setattr(worker, "LEASE_S", LEASE_S)
    with state_in(JobsOptions(state_dir=tmp_path / "state")):
        pass
    monkeypatch.setattr(RandomCalls, "template", tmp_path / "state", raising=False)
    slow = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        RandomCalls,
        settings=settings(
            max_examples=2000,
            stateful_step_count=30,
            database=None,
            deadline=None,
            suppress_health_check=slow,
        ),
    )
