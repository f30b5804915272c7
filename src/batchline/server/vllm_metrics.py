"""The backend's numbers under vLLM's names, so that dashboards and autoscalers made for vLLM work here.

`metrics.py` has the same numbers under Batchline's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from batchline.backends.base import BackendStats

_LABELS = ["model_name", "engine"]
_ENGINE = "0"

_GAUGES: Mapping[str, str] = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_cache_usage",
    "gpu_cache_usage_perc": "kv_cache_usage",  # its name in earlier versions
}
_COUNTERS: Mapping[str, str] = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "output_tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "cached_tokens",
}
_HISTOGRAMS: Mapping[str, str] = {
    "request_prompt_tokens": "prompt_tokens",
    "request_generation_tokens": "output_tokens",
    "request_queue_time_seconds": "queue_seconds",
    "request_prefill_time_seconds": "prefill_seconds",
    "request_decode_time_seconds": "decode_seconds",
    "request_inference_time_seconds": "run_seconds",
    "time_to_first_token_seconds": "first_token_seconds",
    "e2e_request_latency_seconds": "total_seconds",
    "inter_token_latency_seconds": "output_token_seconds",
    "time_per_output_token_seconds": "output_token_seconds",  # its name in earlier versions
}
"""vLLM's names, and the names in `BackendStats` and its parts."""


def vllm_metrics(by_model: Mapping[str, BackendStats]) -> Iterable[Metric]:
    """All metrics, with vLLM's labels."""
    for name, ours in _GAUGES.items():
        gauge = GaugeMetricFamily(f"vllm:{name}", f"The same as batchline_{ours}", labels=_LABELS)
        for model, stats in by_model.items():
            if ours in stats.gauges:
                gauge.add_metric([model, _ENGINE], stats.gauges[ours])
        yield gauge
    for name, ours in _COUNTERS.items():
        counter = CounterMetricFamily(f"vllm:{name}", f"{ours.replace('_', ' ').capitalize()}", labels=_LABELS)
        for model, stats in by_model.items():
            counter.add_metric([model, _ENGINE], getattr(stats, ours))
        yield counter
    success = CounterMetricFamily(
        "vllm:request_success", "The same as batchline_sequences_finished_total", labels=[*_LABELS, "finished_reason"]
    )
    for model, stats in by_model.items():
        for reason, number in stats.sequences.finished.items():
            success.add_metric([model, _ENGINE, reason], number)
    yield success
    for name, ours in _HISTOGRAMS.items():
        yield histogram_family(f"vllm:{name}", f"The same as batchline_sequence_{ours}", ours, _LABELS, by_model)


def histogram_family(
    name: str, text: str, histogram: str, labels: list[str], by_model: Mapping[str, BackendStats]
) -> Metric:
    """A histogram of sequences by model. labels: names for the model and, if there are two, for its engine."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for model, stats in by_model.items():
        counted = stats.sequences.histograms.get(histogram)
        if counted is not None:
            bounds = [*map(floatToGoString, counted.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(counted.counts), strict=True))
            family.add_metric([model, _ENGINE][: len(labels)], buckets, counted.sum)
    return family
