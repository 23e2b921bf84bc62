"""The job's metrics page: every series of the catalog in memory, and its text.

Own storage and encoder, not prometheus_client's registry: a scrape of 5,000 series there holds the interpreter for
26 ms, which a training step feels; here the text of each series is prepared once and a scrape joins strings (1 ms).
"""

import bisect
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from exporter.catalog import CATALOG, Metric
from exporter.exposition import number, series
from exporter.forks import let_go_in_children


class _Histogram:
    """One histogram child: counts per bucket (not cumulative), the sum, and its lines' prepared beginnings."""

    __slots__ = ("bounds", "counts", "prefixes", "total")

    def __init__(self, bounds: tuple[float, ...], prefixes: list[str]) -> None:
        self.bounds = bounds
        self.prefixes = prefixes
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def lines(self) -> Iterator[str]:
        running = 0
        for prefix, count in zip(self.prefixes, self.counts, strict=False):
            running += count
            yield f"{prefix}{running}\n"
        yield f"{self.prefixes[-2]}{running}\n"
        yield f"{self.prefixes[-1]}{number(self.total)}\n"


class Page:
    """The series of one process. Labelled counters and gauges of the catalog with known values are born at 0.

    A gauge without labels is absent until it is first set: "not available" is never 0. `rank` other than "0" keeps
    only the metrics that every rank exports.
    """

    def __init__(self, *, run: str, rank: str = "0", catalog: Iterable[Metric] = CATALOG) -> None:
        self._constant = {"run": run, "rank": rank}
        self._metrics = {m.name: m for m in catalog if m.every_rank or rank == "0"}
        self._values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._metrics}
        self._prefixes: dict[str, dict[tuple[str, ...], str]] = {name: {} for name in self._metrics}
        self._histograms: dict[str, _Histogram] = {}
        # Held over one step's values and over a rendering: a page shows one step, not a mix of two.
        self._lock = threading.RLock()
        let_go_in_children(self)
        for metric in self._metrics.values():
            self._create(metric)

    def let_go(self) -> None:
        """In a forked child: a lock that another thread held at the fork would never be free again."""
        self._lock = threading.RLock()

    @contextmanager
    def update(self) -> Iterator[None]:
        """Keep scrapes out while several values change together."""
        with self._lock:
            yield

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge; `labels` are the values in the catalog's order. NaN and Inf are shown as such."""
        if name in self._metrics:
            with self._lock:
                self._child(name, labels)
                self._values[name][labels] = float(value)

    def set_known(self, name: str, value: float | None, *labels: str) -> None:
        """Set a gauge, or take it off the page where there is no value."""
        if value is None:
            self.clear(name, *labels)
        else:
            self.set(name, value, *labels)

    def clear(self, name: str, *labels: str) -> None:
        """Take a gauge off the page: it is not available now."""
        if name in self._metrics:
            with self._lock:
                self._values[name].pop(labels, None)

    def add(self, name: str, amount: float = 1.0, *labels: str) -> None:
        """Count up."""
        if name in self._metrics:
            with self._lock:
                self._child(name, labels)
                self._values[name][labels] = self._values[name].get(labels, 0.0) + amount

    def observe(self, name: str, value: float) -> None:
        """Put a value into a histogram. A non-finite one is left out: it would spoil the sum for ever."""
        if name in self._metrics and math.isfinite(value):
            with self._lock:
                histogram = self._histograms[name]
                histogram.counts[bisect.bisect_left(histogram.bounds, value)] += 1
                histogram.total += value

    def value(self, name: str, *labels: str) -> float | None:
        """The present value of a gauge or counter."""
        return self._values.get(name, {}).get(labels)

    def render(self, names: frozenset[str] = frozenset()) -> bytes:
        """The page in Prometheus' text format 0.0.4; only the families in `names` if any are given."""
        parts: list[str] = []
        with self._lock:
            for name, metric in self._metrics.items():
                if names and name not in names:
                    continue
                values = self._values[name]
                if not values and name not in self._histograms:
                    continue
                parts.append(f"# HELP {name} {metric.help}\n# TYPE {name} {metric.kind}\n")
                prefixes = self._prefixes[name]
                parts.extend(f"{prefixes[labels]}{number(value)}\n" for labels, value in values.items())
                if name in self._histograms:
                    parts.extend(self._histograms[name].lines())
        return "".join(parts).encode()

    def _create(self, metric: Metric) -> None:
        if metric.kind == "histogram":
            bounds = [*(number(bound) for bound in metric.buckets), "+Inf"]
            prefixes = [self._prefix(metric.name + "_bucket", {"le": bound}) for bound in bounds]
            prefixes += [self._prefix(metric.name + "_count", {}), self._prefix(metric.name + "_sum", {})]
            self._histograms[metric.name] = _Histogram(metric.buckets, prefixes)
        elif metric.kind == "counter" and not metric.where_known:
            for labels in _combinations([values for _, values in metric.labels]):
                self.add(metric.name, 0.0, *labels)

    def _child(self, name: str, labels: tuple[str, ...]) -> None:
        if labels not in self._prefixes[name]:
            keys = [key for key, _ in self._metrics[name].labels]
            self._prefixes[name][labels] = self._prefix(name, dict(zip(keys, labels, strict=True)))

    def _prefix(self, name: str, labels: dict[str, str]) -> str:
        return series(name, {**self._constant, **labels}) + " "


def _combinations(values: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Every combination of the known label values; none where a label has no known values."""
    if not values:
        yield ()
        return
    for first in values[0]:
        for rest in _combinations(values[1:]):
            yield (first, *rest)
