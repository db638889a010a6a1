"""An engine's report as Prometheus metrics, through ``prometheus_client`` (the extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from forebay.specs.errors import Unsupported

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise Unsupported("Prometheus text needs prometheus_client: pip install 'forebay[metrics]'") from error

Report = Mapping[str, Any]

COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "steps": ("forebay_decode_steps", "Decode steps dispatched."),
    "eager_steps": ("forebay_eager_decode_steps", "Decode steps in which the host supplied every id."),
    "tokens": ("forebay_tokens", "Tokens released."),
    "prefills": ("forebay_prefills", "Prompts computed to their end, again after a preemption too."),
    "prefill_tokens": ("forebay_prefill_tokens", "Prompt tokens computed."),
    "reused_tokens": ("forebay_reused_tokens", "Prompt tokens whose KV was cached already."),
    "forks": ("forebay_forks", "Samples that began with the blocks of another one."),
    "reseeds": ("forebay_reseeds", "Rows seeded again because a receipt did not match."),
    "preemptions": ("forebay_preemptions", "Running requests that had to give way."),
    "block_copies": ("forebay_kv_block_copies", "Shared KV blocks copied before a write."),
}
"""Counts of ``report["engine"]``: name and help of each metric."""

LATENCIES: Final[Mapping[str, tuple[str, str]]] = {
    "queue_wait_s": ("forebay_queue_wait_seconds", "From a request's arrival to its first slot."),
    "time_to_first_token_s": ("forebay_time_to_first_token_seconds", "From a request's arrival to its first token."),
    "inter_token_s": ("forebay_inter_token_seconds", "Between two tokens of a request."),
}

DEVICE_ACTS: Final = ("run", "capture", "replay", "recapture", "declined", "uploads", "downloads", "syncs")


class ReportCollector(Collector):
    """Metrics of a report, read anew for each scrape.

    Args:
        read: gives the report. A scrape may come in any thread, and an engine belongs to one: with a server of ``prometheus_client``
            give it a report that the engine's thread has made.
    """

    def __init__(self, read: Callable[[], Report]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Every metric of the report as it is now."""
        report = self._read()
        yield _info(report)
        yield from _requests(report)
        yield from _memory(report["memory"])
        yield from _device(report)
        yield from _latencies(report["latencies"])


def metrics_text(report: Report) -> str:
    """A report in Prometheus' text format, with a registry of its own."""
    registry = CollectorRegistry()
    registry.register(ReportCollector(lambda: report))
    return generate_latest(registry).decode()


def _info(report: Report) -> Metric:
    backend, model, memory = report["backend"], report["model"], report["memory"]
    labels = {
        "arm": report["arm"],
        "backend": backend["name"],
        "mode": backend["mode"],
        "model": model["name"],
        "dtype": model["dtype"],
        "kv_dtype": memory["kv_dtype"],
        "kv_layout": memory["layout"],
    }
    return InfoMetricFamily("forebay_engine", "What runs, and on what.", {k: str(v) for k, v in labels.items()})


def _requests(report: Report) -> Iterator[Metric]:
    counts = report["engine"]
    for key, (name, text) in COUNTERS.items():
        yield CounterMetricFamily(name, text, counts[key])
    ends = ("finished", "cancelled", "deadline", "error")
    yield _counters("forebay_requests", "Requests that ended, by how.", "end", ((end, counts[end]) for end in ends))
    acts = (("saved", "offloaded"), ("restored", "restored"), ("refused", "offload_refused"))
    offloads = ((label, counts[key]) for label, key in acts)
    yield _counters("forebay_offloads", "Preempted requests and their KV in host memory.", "act", offloads)
    yield _gauges("forebay_current_requests", "Requests in the engine now.", "state", report["requests"].items())


def _memory(memory: Report) -> Iterator[Metric]:
    states = ("free", "allocated", "in_flight", "cached", "offloaded")
    blocks = ((state, memory[f"blocks_{state}"]) for state in states)
    yield _gauges("forebay_kv_blocks", "KV blocks; cached ones are among the allocated ones.", "state", blocks)
    yield GaugeMetricFamily("forebay_kv_capacity_tokens", "Tokens the KV pool has room for.", memory["capacity_tokens"])
    yield GaugeMetricFamily("forebay_kv_bytes", "Bytes of the KV pool.", memory["kv_bytes"])
    yield GaugeMetricFamily("forebay_weight_bytes", "Bytes of the model's weights.", memory["weight_bytes"])


def _device(report: Report) -> Iterator[Metric]:
    counts = report["counters"]
    acts = ((act, counts[act]) for act in DEVICE_ACTS)
    yield _counters("forebay_device_acts", "What the backend did since it was opened.", "act", acts)
    yield CounterMetricFamily("forebay_upload_bytes", "Bytes written to device memory.", counts["upload_bytes"])
    yield CounterMetricFamily("forebay_dropped_rows", "Rows dropped at the pools' doors.", counts["dropped"])
    yield CounterMetricFamily("forebay_invalid_table_entries", "Invalid block table entries met.", counts["invalid"])
    launches, delegated = counts["launches"].items(), counts["delegated"].items()
    yield _counters("forebay_kernel_launches", "Launches of the backend's own kernels.", "operation", launches)
    yield _counters("forebay_delegated", "Operations done by the numpy defaults.", "operation", delegated)
    lanes = CounterMetricFamily("forebay_lane_acts", "What each lane did.", labels=("bucket", "variant", "act"))
    for lane in report["lanes"]:
        for act in ("run", "replay", "capture", "declined", "released"):
            lanes.add_metric((str(lane["bucket"]), lane["variant"], act), lane[act])
    yield lanes


def _latencies(latencies: Report) -> Iterator[Metric]:
    for key, (name, text) in LATENCIES.items():
        times = latencies[key]
        buckets = [*times["buckets"].items(), ("+Inf", times["count"])]
        yield HistogramMetricFamily(name, text, buckets=buckets, sum_value=times["sum"])
    steps, seconds = latencies["worst_wait_steps"], latencies["worst_wait_s"]
    yield GaugeMetricFamily("forebay_worst_queue_wait_steps", "Engine steps of the longest wait for a slot.", steps)
    yield GaugeMetricFamily("forebay_worst_queue_wait_seconds", "The longest wait for a slot.", seconds)


def _counters(name: str, text: str, label: str, values: Iterable[tuple[str, int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in values:
        family.add_metric((value,), count)
    return family


def _gauges(name: str, text: str, label: str, values: Iterable[tuple[str, int]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for value, count in values:
        family.add_metric((value,), count)
    return family
