"""What a finished run has to say about itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from batchline.model_record import ModelRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMessage:
    """Why lines failed. code: HTTP status, or the code of a line that could not be a request. message: of the first.

    line_numbers: the first few lines, from 1.
    """

    code: str
    message: str
    count: int
    line_numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The end of a run. Counts cover the whole result file, those lines too that an earlier, interrupted run did.

    requests: result lines. failures_by_code: HTTP status, or the code of a line that could not be a request.
    prompt_tokens, cached_tokens and output_tokens: what was really computed or reused, copies not counted again.
    deduplicated: requests served by the answer of an identical one; deduplicated_tokens: what that spared, prompts and
    outputs. resumed: lines that an earlier run did. frequent_failures: the most frequent messages.
    load_time_s: until the backend was ready. run_time_s: from then until the last answer was saved. The rates are those
    of this time, without what an earlier run did.
    models: what ran, of every model that this run loaded.
    finished_before: when an equal run finished whose results are still there, so that this one computed nothing.
    output, error_file: where the results are, as the user wrote it without the secrets of a URL.
    """

    requests: int
    succeeded: int
    failed: int
    failures_by_code: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    deduplicated: int = 0
    deduplicated_tokens: int = 0
    resumed: int = 0
    frequent_failures: tuple[FailureMessage, ...] = ()
    load_time_s: float = 0.0
    run_time_s: float = 0.0
    requests_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0
    output_tokens_per_s: float = 0.0
    wall_time_s: float = 0.0
    models: tuple[ModelRecord, ...] = ()
    finished_before: datetime | None = None
    output: str = ""
    error_file: str | None = None

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The share of prompt tokens that came from the prefix cache, 0 to 1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def has_only_failures(self) -> bool:
        """Whether there were requests and none of them succeeded."""
        return self.requests > 0 and self.succeeded == 0
