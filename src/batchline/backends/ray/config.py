"""The settings of replicas on Ray. Imports no Ray, so that options can be checked without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from batchline.backends.replicas.autoscaling import PoolSize
from batchline.backends.replicas.fleet import DEFAULT_PATIENCE_S

FOUND_OR_NEW = "auto"
"""The address that means: the cluster of `RAY_ADDRESS` or of this machine, or else a new one for this run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Where the replicas run, how many there are, and what each reserves.

    address: `host:port` of the cluster's head, or `FOUND_OR_NEW`. num_gpus: None reserves a GPU for each replica if the
    cluster has any. resources: amounts of other resources, by name. patience_s: how long no replica may be ready.
    """

    address: str = FOUND_OR_NEW
    size: PoolSize = field(default_factory=lambda: PoolSize(1, 1))
    num_cpus: float = 1.0
    num_gpus: float | None = None
    resources: Mapping[str, float] = field(default_factory=dict)
    patience_s: float = DEFAULT_PATIENCE_S
