"""The receiver's own metrics, in a registry of their own."""

from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric

from exporter.intake import ALERT_OUTCOMES
from exporter.runs import find_run

DELIVERY_OUTCOMES = (*ALERT_OUTCOMES, "bad_request", "unauthorized", "too_large", "unavailable")


class _Registry(CollectorRegistry):
    """A registry without `_created` series: the library's own switch for them would also hit everybody else's."""

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class ReceiverMetrics:
    """Counts what came in. A run is named here only while it has a folder, so that no sender can make up series."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        self.registry = _Registry()
        self._deliveries = Counter(
            "receiver_deliveries_total",
            "Alerts by what became of them, and deliveries refused as a whole.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in DELIVERY_OUTCOMES:
            self._deliveries.labels(outcome)
        self.seconds = Histogram(
            "receiver_delivery_seconds",
            "Time to answer one delivery.",
            registry=self.registry,
        )
        self._heartbeat = Gauge(
            "receiver_last_heartbeat_timestamp_seconds",
            "When the watchdog alert of the run last came in.",
            ["run"],
            registry=self.registry,
        )
        self._heard: set[str] = set()

    def count(self, outcome: str) -> None:
        """One more of `outcome`."""
        self._deliveries.labels(outcome).inc()

    def heard(self, run: str, now: float) -> None:
        """A heartbeat of `run` was written at `now`."""
        self._heard.add(run)
        self._heartbeat.labels(run).set(now)

    def forget_gone_runs(self) -> None:
        """Drop the series of runs whose folder has been removed."""
        for run in tuple(self._heard):
            try:
                gone = find_run(self._runs, run) is None
            except OSError:  # It is there, but cannot be looked at now.
                continue
            if gone:
                self._heard.discard(run)
                self._heartbeat.remove(run)
