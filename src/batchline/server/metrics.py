"""The metrics for Prometheus: requests and times measured by the server, tokens and queues counted by the backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from batchline.backends.base import BackendStats, ServedModel
from batchline.model_facts import ModelFacts
from batchline.server.vllm_metrics import histogram_family, vllm_metrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The content type of Prometheus' text format."""

_REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)


_SEQUENCE_HISTOGRAMS: Mapping[str, str] = {
    "prompt_tokens": "Prompt tokens of a sequence",
    "output_tokens": "Output tokens of a sequence",
    "queue_seconds": "From a sequence's arrival to its first step",
    "prefill_seconds": "From a sequence's first step to its first token",
    "first_token_seconds": "From a sequence's arrival to its first token",
    "decode_seconds": "From a sequence's first token to its end",
    "run_seconds": "From a sequence's first step to its end",
    "total_seconds": "From a sequence's arrival to its end",
    "output_token_seconds": "Between two tokens of a sequence, each counted with the sequence's mean",
}
"""What each histogram of `BackendStats.sequences` measures."""


class Metrics:
    """The metrics of one server, in a separate registry.

    num_in_flight: requests that do work, queued or running. body_bytes: the memory of all requests' bodies.
    """

    def __init__(self, backend_stats: Callable[[], BackendStats]) -> None:
        self._registry = CollectorRegistry()
        self._collector = _BackendCollector(backend_stats)
        self._registry.register(self._collector)
        self.num_in_flight = 0
        Gauge(
            "batchline_requests_in_flight", "Requests in the server, running and waiting", registry=self._registry
        ).set_function(lambda: self.num_in_flight)
        self.body_bytes = Gauge(
            "batchline_request_body_bytes",
            "Bytes of the bodies of requests that are being received or answered, without small ones",
            registry=self._registry,
        )
        self._requests = Counter(
            "batchline_requests", "Requests by path and status", ["endpoint", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "batchline_request_duration_seconds",
            "From a request's first byte to its answer's last",
            ["endpoint"],
            buckets=_REQUEST_BUCKETS,
            registry=self._registry,
        )
        self._first_token = Histogram(
            "batchline_time_to_first_token_seconds",
            "From a streamed request to its first chunk",
            ["endpoint"],
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._per_token = Histogram(
            "batchline_time_per_output_token_seconds",
            "Mean time between the chunks of a streamed request's first choice; under load one may have several tokens",
            ["endpoint"],
            buckets=_TOKEN_BUCKETS,
            registry=self._registry,
        )

    def observe_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a finished request. endpoint: from a bounded set of paths."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    async def timed(
        self, endpoint: str, chunks: AsyncIterator[Mapping[str, Any]]
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """The same chunks, with their times measured. Closing the iterator closes them."""
        started = perf_counter()
        first: float | None = None
        first_counted, last, num_chunks = started, started, 0
        try:
            async for chunk in chunks:
                now = perf_counter()
                if first is None:
                    first = now
                    self._first_token.labels(endpoint).observe(first - started)
                if _adds_to_first_choice(chunk):
                    first_counted = first_counted if num_chunks else now
                    last, num_chunks = now, num_chunks + 1
                yield chunk
        finally:
            if num_chunks > 1:
                self._per_token.labels(endpoint).observe((last - first_counted) / (num_chunks - 1))
            if isinstance(chunks, AsyncGenerator):
                await chunks.aclose()

    def render(self, models: Sequence[ServedModel] = ()) -> bytes:
        """All metrics in Prometheus' text format. models: those that the backend serves now."""
        self._collector.models = models
        return generate_latest(self._registry)


def _adds_to_first_choice(chunk: Mapping[str, Any]) -> bool:
    """Whether a chunk of any API has new output for choice 0: text, reasoning or a part of a call."""
    if chunk.get("type") in _DELTA_EVENTS:
        return True
    first: Mapping[str, Any] = next((choice for choice in chunk.get("choices") or () if choice["index"] == 0), {})
    delta = first.get("delta", {})
    return bool(first.get("text")) or any(delta.get(name) for name in _DELTA_FIELDS)


_DELTA_FIELDS = ("content", "reasoning", "reasoning_content", "tool_calls", "function_call")
_DELTA_EVENTS = frozenset(
    {
        "content_block_delta",
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.function_call_arguments.delta",
    }
)


class _BackendCollector(Collector):
    """The backend's own numbers, fetched for each scrape."""

    def __init__(self, stats: Callable[[], BackendStats]) -> None:
        self._stats = stats
        self.models: Sequence[ServedModel] = ()

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        yield CounterMetricFamily(
            "batchline_prompt_tokens", "Tokens of all prompts that were computed", stats.prompt_tokens
        )
        yield CounterMetricFamily(
            "batchline_cached_prompt_tokens", "Prompt tokens from the prefix cache", stats.cached_tokens
        )
        yield CounterMetricFamily("batchline_output_tokens", "Tokens generated", stats.output_tokens)
        yield CounterMetricFamily(
            "batchline_encoded_media", "Images and windows of recordings that were encoded", stats.encoded_media
        )
        yield CounterMetricFamily(
            "batchline_audio_seconds", "Seconds of recordings that were transcribed", stats.audio_s
        )
        yield CounterMetricFamily(
            "batchline_preemptions", "How often a running sequence was preempted", stats.preemptions
        )
        for name, value in stats.gauges.items():
            yield GaugeMetricFamily(f"batchline_{name}", f"The backend's {name.replace('_', ' ')}", value)
        yield from _sequence_metrics(stats.by_model)
        yield from vllm_metrics(stats.by_model)
        yield _model_info(model.facts for model in self.models if model.facts is not None)


def _sequence_metrics(by_model: Mapping[str, BackendStats]) -> Iterable[Metric]:
    """The counts of sequences, by model."""
    finished = CounterMetricFamily(
        "batchline_sequences_finished", "Sequences that have ended, by reason", labels=["model", "reason"]
    )
    for model, stats in by_model.items():
        for reason, number in stats.sequences.finished.items():
            finished.add_metric([model, reason], number)
    yield finished
    for name, text in _SEQUENCE_HISTOGRAMS.items():
        yield histogram_family(f"batchline_sequence_{name}", text, name, ["model"], by_model)


def _model_info(models: Iterable[ModelFacts]) -> Metric:
    """A gauge of value 1 for each model in memory; its labels describe how the model runs."""
    labels = [model.labels() for model in models]
    family = GaugeMetricFamily("batchline_model_info", "What runs, by labels", labels=list(labels[0]) if labels else [])
    for of_model in labels:
        family.add_metric(list(of_model.values()), 1)
    return family


class RunMetric(NamedTuple):
    """A number of a batch run. name: behind `batchline_run_`."""

    name: str
    kind: Literal["gauge", "counter"]
    text: str
    value: float


class _RunCollector(Collector):
    """The numbers of a batch run at one moment."""

    def __init__(self, metrics: Iterable[RunMetric], models: Iterable[ModelFacts]) -> None:
        self._metrics = metrics
        self._models = models

    def collect(self) -> Iterable[Metric]:
        for metric in self._metrics:
            family = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            yield family(f"batchline_run_{metric.name}", metric.text, metric.value)
        yield _model_info(self._models)


def run_metrics_text(metrics: Iterable[RunMetric], models: Iterable[ModelFacts]) -> bytes:
    """The numbers of a batch run, and what runs, in Prometheus' text format."""
    return generate_latest(_RunCollector(metrics, models))
