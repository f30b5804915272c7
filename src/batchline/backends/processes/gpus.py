"""Which GPUs the engines may use: those of CUDA_VISIBLE_DEVICES, or all that `nvidia-smi` lists."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from batchline.errors import UsageError, counted

VARIABLE = "CUDA_VISIBLE_DEVICES"
_LISTING_S = 30.0


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """The names of the GPUs, as CUDA_VISIBLE_DEVICES has them; empty without any."""
    listed = environment.get(VARIABLE)
    if listed is not None:
        names = [name.strip() for name in listed.split(",")]
        ends = [index for index, name in enumerate(names) if name in ("", "-1", "NoDevFiles")]
        return names[: ends[0]] if ends else names  # CUDA ignores what follows an invalid one
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_LISTING_S, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip().isdigit()]


def share_gpus(gpus: list[str], num_replicas: int, gpus_each: int | None) -> list[list[str]]:
    """The GPUs of each replica; empty lists on a machine without GPUs. gpus_each: None divides all of them equally.

    Raises: UsageError if there are too few.
    """
    if not gpus:
        return [[] for _ in range(num_replicas)]
    if num_replicas > len(gpus):
        raise UsageError(
            f"--engine-replicas {num_replicas} needs as many GPUs, and only {counted(len(gpus), 'GPU')} can be used."
        )
    each = gpus_each or len(gpus) // num_replicas
    if each * num_replicas > len(gpus):
        replicas = f" for each of {num_replicas} replicas" if num_replicas > 1 else ""
        raise UsageError(
            f"--tensor-parallel-size {each}{replicas} needs {each * num_replicas} GPUs, and only "
            f"{counted(len(gpus), 'GPU')} can be used."
        )
    return [gpus[start : start + each] for start in range(0, each * num_replicas, each)]
