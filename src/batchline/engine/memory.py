"""How much memory is free where models run."""

from __future__ import annotations

import psutil


def free_bytes(device_type: str | None = None) -> int:
    """Bytes that could still be taken on the GPU or the machine; None takes the GPU where there is one."""
    import torch  # for seconds: whoever starts up wants this module without it

    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        return torch.cuda.mem_get_info()[0]
    return int(psutil.virtual_memory().available)
