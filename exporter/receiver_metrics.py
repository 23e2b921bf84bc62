"""The receiver's own metrics, in a registry of their own."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from exporter.intake import ALERT_OUTCOMES
from exporter.run_status import RunStatus, read_runs
from exporter.runs import find_run

# Well below the time in which Prometheus wants an answer.
LOOK_SECONDS = 2.0
DELIVERY_OUTCOMES = (*ALERT_OUTCOMES, "bad_request", "unauthorized", "forbidden", "too_large", "unavailable")


class _Registry(CollectorRegistry):
    """A registry without `_created` series: the library's own switch for them would also hit everybody else's."""

    def collect(self) -> Iterable[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class _RunGauges(Collector):
    """The runs as they were seen last."""

    def __init__(self) -> None:
        self.seen: list[RunStatus] = []

    def collect(self) -> Iterable[Metric]:
        states = GaugeMetricFamily(
            "receiver_run_state",
            "1 if the run's folder says so, else 0; also of runs whose job has ended.",
            labels=["run", "state"],
        )
        waiting = GaugeMetricFamily(
            "receiver_commands_waiting", "Commands in the run's inbox that the job has not taken.", labels=["run"]
        )
        wait = GaugeMetricFamily(
            "receiver_command_wait_seconds",
            "Time that the oldest of them has waited; 0 if none.",
            labels=["run"],
        )
        for status in self.seen:
            for state, holds in status.states.items():
                states.add_metric([status.run, state], float(holds))
            waiting.add_metric([status.run], len(status.waits))
            wait.add_metric([status.run], max(status.waits, default=0.0))
        return [states, waiting, wait]


class ReceiverMetrics:
    """Counts what came in. A run is named here only while it has a folder, so that no sender can make up series.

    Args:
        runs: the folder that holds the runs' folders.
        now: the clock, in Unix seconds.
        look_seconds: how long a scrape waits for the folders to be read.
    """

    def __init__(self, runs: Path, *, now: Callable[[], float], look_seconds: float) -> None:
        self._runs = runs
        self._now = now
        self._look_seconds = look_seconds
        self._looking: threading.Thread | None = None
        self._lock = threading.Lock()
        self.registry = _Registry()
        self._run_gauges = _RunGauges()
        self.registry.register(self._run_gauges)
        self._deliveries = Counter(
            "receiver_deliveries_total",
            "Alerts by what became of them, and deliveries refused as a whole.",
            ["outcome"],
            registry=self.registry,
        )
        for outcome in DELIVERY_OUTCOMES:
            self._deliveries.labels(outcome)
        self._truncated = Counter(
            "receiver_alerts_truncated_total",
            "Alerts that the sender cut off its deliveries.",
            registry=self.registry,
        )
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

    def truncated(self, alerts: int) -> None:
        """So many alerts were cut off a delivery."""
        self._truncated.inc(alerts)

    def heard(self, run: str, now: float) -> None:
        """A heartbeat of `run` was written at `now`."""
        self._heard.add(run)
        self._heartbeat.labels(run).set(now)

    def look(self) -> None:
        """Look at the runs' folders, in one thread for all scrapes, and wait for it a moment.

        A file system that hangs holds up that thread and nothing else: no delivery, and not the end of the process.
        What was seen last stays.
        """
        with self._lock:
            if self._looking is None or not self._looking.is_alive():
                self._looking = threading.Thread(target=self._look, name="look", daemon=True)
                self._looking.start()
            looking = self._looking
        looking.join(self._look_seconds)

    def _look(self) -> None:
        self._forget_gone_runs()
        try:
            self._run_gauges.seen = read_runs(self._runs, self._now())
        except OSError:  # `/-/ready` tells.
            return

    def _forget_gone_runs(self) -> None:
        """Drop the heartbeats of runs whose folder has been removed."""
        for run in tuple(self._heard):
            try:
                gone = find_run(self._runs, run) is None
            except OSError:  # It is there, but cannot be looked at now.
                continue
            if gone:
                self._heard.discard(run)
                self._heartbeat.remove(run)
