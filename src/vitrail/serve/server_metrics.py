"""Metrics of the server in the text format of Prometheus."""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds
HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from a request to its first token.",
    "request_seconds": "Seconds from a request to the end of its response.",
}


class ServerMetrics:
    """Counts of requests by endpoint and status, and histograms of their times."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.requests: Counter[tuple[str, int]] = Counter()
        self._buckets = {name: [0] * (len(BUCKETS) + 1) for name in HISTOGRAMS}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def count_request(self, endpoint: str, status: int) -> None:
        with self._lock:
            self.requests[endpoint, status] += 1

    def observe(self, name: str, seconds: float) -> None:
        """Add a time to a histogram."""
        with self._lock:
            index = next((i for i, limit in enumerate(BUCKETS) if seconds <= limit), len(BUCKETS))
            self._buckets[name][index] += 1
            self._sums[name] += seconds

    def render(self, gauges: Mapping[str, tuple[str, Mapping[str, float]]]) -> str:
        """Render all metrics. `gauges`: name → type, and value by model."""
        lines = ["# TYPE vitrail_requests_total counter"]
        with self._lock:
            lines += [
                f'vitrail_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}'
                for (endpoint, status), count in sorted(self.requests.items())
            ]
            for name, text in HISTOGRAMS.items():
                lines += self._render_histogram(name, text)
        for name, (kind, values) in gauges.items():
            lines.append(f"# TYPE vitrail_{name} {kind}")
            lines += [f'vitrail_{name}{{model="{_escape(model)}"}} {value:g}' for model, value in values.items()]
        return "\n".join(lines) + "\n"

    def _render_histogram(self, name: str, text: str) -> Iterable[str]:
        yield f"# HELP vitrail_{name} {text}"
        yield f"# TYPE vitrail_{name} histogram"
        total = 0
        for limit, count in zip((*map(str, BUCKETS), "+Inf"), self._buckets[name], strict=True):
            total += count
            yield f'vitrail_{name}_bucket{{le="{limit}"}} {total}'
        yield f"vitrail_{name}_sum {self._sums[name]:g}"
        yield f"vitrail_{name}_count {total}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
