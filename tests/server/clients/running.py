"""Running a client's script in the clients' environment: Python's, or Node's for `.cjs`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ENVIRONMENT = Path(__file__).parents[3] / ".venv-clients"
PYTHON = ENVIRONMENT / "bin/python"
NODE_MODULES = ENVIRONMENT / "npm/node_modules"

QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it is downloaded at import
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
    "NODE_PATH": str(NODE_MODULES),
    "NODE_NO_WARNINGS": "1",
}


def interpreter_of(script: str) -> str:
    """What runs a script. The test is skipped where that, or the clients, are not installed."""
    is_python = script.endswith(".py")
    if not (PYTHON if is_python else NODE_MODULES).exists():
        pytest.skip("the clients have an environment of their own: `make clients`; those of npm need Node and npm")
    return str(PYTHON) if is_python else shutil.which("node") or pytest.skip("there is no Node on this machine")


def results_of(script: str, *urls: str) -> dict[str, Any]:
    """What the script's calls gave, by their names. urls: of the servers, without a path."""
    command = [interpreter_of(script), script, *(f"{url}/v1" for url in urls)]
    done = subprocess.run(command, cwd=HERE, env={**os.environ, **QUIET}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results
