"""Where the Triton kernels of the tests run: on the GPU, or interpreted on the CPU (see the suite's conftest)."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("without a GPU the kernels need TRITON_INTERPRET=1")
    return torch.device("cpu")
