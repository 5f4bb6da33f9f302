"""What a server has done and holds, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from attnspan.engine import AsyncEngine, Histogram


class ServerMetrics:
    """Counts of this server; those of its engine are asked for when they are written."""

    def __init__(self) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()  # by path and status

    def text(self, engine: AsyncEngine) -> str:
        stats = engine.stats()
        lines = [
            *_gauge("requests_running", "Samples that the engine computes.", {"": stats.running}),
            *_gauge("requests_waiting", "Samples that wait for room.", {"": stats.waiting}),
            *_gauge("streams_open", "Requests of clients that have not ended.", {"": engine.open_calls}),
            *_gauge(
                "pages",
                "Pages of the KV cache.",
                {
                    'state="used"': stats.pages_used,
                    'state="free"': stats.pages_free,
                    'state="cached"': stats.pages_cached,
                },
            ),
            *_counter("prompt_tokens", "Tokens of prompts.", {"": stats.prompt_tokens}),
            *_counter("prefix_hit_tokens", "Tokens of prompts found in the prefix cache.", {"": stats.prefix_tokens}),
            *_counter("generated_tokens", "Tokens generated.", {"": stats.generated_tokens}),
            *_counter("computed_tokens", "Tokens fed to the model.", {"": stats.computed_tokens}),
            *_counter("steps", "Calls of the model.", {"": stats.steps}),
            *_counter("failed_steps", "Steps that raised an error.", {"": engine.failed_steps}),
            *_counter("preemptions", "Samples sent back to the queue.", {"": stats.preempted}),
            *_counter("refused", "Requests that found the queue full.", {"": engine.refused_calls}),
            *_counter("finished", "Samples, by why they ended.", _labelled("reason", stats.finished)),
            *_counter(
                "http_responses",
                "Responses, by path and status; 499: the client went away.",
                {f'path="{path}",status="{status}"': count for (path, status), count in sorted(self.responses.items())},
            ),
            *_histogram("time_to_first_token_seconds", "From a request to its first token.", stats.time_to_first_token),
            *_histogram("time_per_token_seconds", "Mean time of a sample's later tokens.", stats.time_per_token),
            *_histogram("request_seconds", "From a request to its end.", engine.durations),
        ]
        return "\n".join(lines) + "\n"


def _labelled(label: str, counts: Mapping[str, int]) -> dict[str, int]:
    return {f'{label}="{name}"': count for name, count in sorted(counts.items())}


def _family(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP attnspan_{name} {text}", f"# TYPE attnspan_{name} {kind}"]


def _values(name: str, values: Mapping[str, float]) -> Iterable[str]:
    return (
        f"attnspan_{name}{{{labels}}} {value}" if labels else f"attnspan_{name} {value}"
        for labels, value in values.items()
    )


def _gauge(name: str, text: str, values: Mapping[str, float]) -> list[str]:
    return [*_family(name, "gauge", text), *_values(name, values)]


def _counter(name: str, text: str, values: Mapping[str, float]) -> list[str]:
    return [*_family(f"{name}_total", "counter", text), *_values(f"{name}_total", values)]


def _histogram(name: str, text: str, times: Histogram) -> list[str]:
    lines, below = _family(name, "histogram", text), 0
    for bound, count in zip((*times.bounds, "+Inf"), times.counts, strict=True):
        below += count
        lines.append(f'attnspan_{name}_bucket{{le="{bound}"}} {below}')
    return [*lines, f"attnspan_{name}_sum {times.total}", f"attnspan_{name}_count {below}"]
