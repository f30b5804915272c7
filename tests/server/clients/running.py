"""Running a client's script in the clients' environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PYTHON = Path(__file__).parents[3] / ".venv-clients/bin/python"

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it is downloaded at import
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
}


def results_of(script: str, *urls: str) -> dict[str, Any]:
    """What the script's calls gave, by their names. urls: of the servers, without a path."""
    if not PYTHON.exists():
        pytest.skip("the clients have an environment of their own: `make clients`")
    command = [str(PYTHON), script, *(f"{url}/v1" for url in urls)]
    done = subprocess.run(command, cwd=HERE, env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results
