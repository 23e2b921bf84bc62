"""A run without a model: its losses are told, all the rest from detectors to endpoint is the product's own."""

import heapq
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from curves import signals
from msgspec.structs import replace

from exporter.catalog import CATALOG
from exporter.serving import MetricsServer
from trainer_plugin.config import Config, MetricsConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.endpoint import Endpoint
from trainer_plugin.metrics import Standing
from trainer_plugin.placement import Placement
from trainer_plugin.policy.escalation import NO_UPDATES_STEPS, withheld_too_long
from trainer_plugin.run_folder import JobFolder
from trainer_plugin.signals import Signals

WARM_STEPS = 600
LOSS, GRAD_NORM = 2.0, 1.0
INFO = dict.fromkeys((label for metric in CATALOG if metric.name == "train_info" for label, _ in metric.labels), "none")
# A target that is new to Prometheus: it looks at its file at once, and takes changes over every 5 s.
DISCOVERY_SECONDS = 6.0
# The alert of each verdict.
EVENT_ALERTS = {
    ("robust", "loss"): "TrainLossSpike",
    ("ema_ratio", "grad_norm"): "TrainGradNormSurge",
    ("drift", "loss"): "TrainLossDrift",
    ("oscillation", "loss"): "TrainLossOscillating",
    ("nonfinite", "loss"): "TrainNonFinite",
    ("nonfinite", "grad_norm"): "TrainNonFinite",
}

# Steps, pauses in seconds, and what is done between two steps.
Series = Iterator[Signals | float | Callable[[], object]]
Clock = Callable[[], float]


class SimulatedRun:
    """One run: `events` and `states` are what detectors and policy's thresholds say and when, by alert (Unix seconds).

    A state has a beginning and an end, infinite while it lasts. `dark` are the times in which the run could not be
    scraped. `steps` are time, step and steps_total, each time that they changed. `noise` is that of a calm step's loss
    and gradient norm, as a part of them.
    """

    def __init__(self, runs: Path, name: str, *, steps_per_second: float = 50.0, clock: Clock = time.time) -> None:
        self.name = name
        self._clock = clock
        self.steps_per_second = steps_per_second
        self.folder = JobFolder(runs, name)
        self.config = Config(run=name, runs=str(runs))
        self.monitor = Monitor(self.config.detection)
        self.step = self.steps_total = 0
        self.steps: list[tuple[float, int, int]] = []
        self.events: dict[str, list[float]] = {}
        self.states: dict[str, list[list[float]]] = {}
        self.dark: list[list[float]] = []
        self.noise = 0.02
        self._random = np.random.default_rng(0)
        self._saved: tuple[int, dict[str, Any]] = (0, self.monitor.state_dict())
        self._open_endpoint()
        self.hurry(WARM_STEPS)

    def close(self) -> None:
        """The run ends in order."""
        self.endpoint.close()
        self.folder.lock.release()

    def next(self, *, loss: float = 1.0, grad_norm: float = 1.0, **changes: Any) -> Signals:
        """The next step: its values are told as multiples of the usual ones, which alone have noise."""
        noise = [
            1.0 if told != 1.0 else 1.0 + self.noise * self._random.standard_normal() for told in (loss, grad_norm)
        ]
        return signals(self.step + 1, LOSS * loss * noise[0], grad_norm=GRAD_NORM * grad_norm * noise[1], **changes)

    def calm(self, steps: float, **told: Any) -> Iterator[Signals]:
        """So many steps, all with the same values told, if any."""
        for _ in range(math.ceil(steps)):
            yield self.next(**told)

    def take(self, told: Signals) -> None:
        """One step, from its signals to the page."""
        readings, verdicts = self.monitor.update(told)
        now = self._clock()
        self.step, self.steps_total = told.step, self.steps_total + 1
        with self.endpoint.page.update():
            self.endpoint.metrics.show(told, readings, verdicts, now)
            self._stand()
        self.steps.append((now, self.step, self.steps_total))
        for verdict in verdicts:
            if (alert := EVENT_ALERTS.get((verdict.detector, verdict.signal))) is not None:
                self.events.setdefault(alert, []).append(now)
        sustained_steps = self.config.detection.sustained_steps
        self._note("TrainLossSpikeSustained", now, holds=readings.loss_high_steps[3.0] >= sustained_steps)
        self._note("TrainLossNotRecovering", now, holds=readings.loss_unrecovered_steps >= sustained_steps)
        withheld = withheld_too_long(readings.withheld_steps, sustained_steps, step=self.step, target_step=self.step)
        self._note("TrainNoUpdates", now, holds=withheld)
        if readings.withheld_steps == NO_UPDATES_STEPS:
            self.events.setdefault("TrainUpdatesWithheld", []).append(now)
        self._note("TrainAmpScaleCollapse", now, holds=readings.amp_scale_collapsed)

    def hurry(self, steps: int) -> None:
        """So many calm steps in no time."""
        for told in self.calm(steps):
            self.take(told)

    def save(self) -> None:
        """A checkpoint of the run as it is now."""
        self._saved = (self.step, self.monitor.state_dict())

    def roll_back(self) -> None:
        """Go back to the checkpoint."""
        self.step, state = self._saved
        self.monitor.load_state_dict(state)
        with self.endpoint.page.update():
            self._stand()
        self.steps.append((self._clock(), self.step, self.steps_total))

    def die_and_start_again(self, *, port: int = 0) -> None:
        """Killed, and started again from the checkpoint: another page, its counters from 0; port 0 is another one."""
        self.go_dark()
        for alert in self.states:
            self._note(alert, self._clock(), holds=False)
        self.step, state = self._saved
        self.monitor = Monitor(self.config.detection)
        self.monitor.load_state_dict(state)
        self._open_endpoint(port)
        self.dark[-1][1] = self._clock() + DISCOVERY_SECONDS

    def go_dark(self) -> None:
        """The page does not answer any more."""
        self.dark.append([self._clock(), math.inf])
        self.endpoint._server.close()

    def answer(self) -> None:
        """It answers again, on its old port."""
        self.endpoint._server = MetricsServer(self.endpoint.page, host="127.0.0.1", port=self.endpoint.port)
        assert self.endpoint._server.port == self.endpoint.port
        self.dark[-1][1] = self._clock()

    def _open_endpoint(self, port: int = 0) -> None:
        config = replace(self.config, metrics=MetricsConfig(port=port))
        self.endpoint = Endpoint(
            config, layers=(), moments={}, scaled=False, steps_total=self.steps_total, info=INFO,
            placement=Placement(gpu_uuid="", hostname="node-1"),
        )  # fmt: skip

    def _stand(self) -> None:
        standing = Standing(
            steps_total=self.steps_total, lr_factor=1.0, clip_max_norm=None, incident_open=False, loop_up=True,
            rollback_target_step=self.step, checkpoint_steps={}, checkpoint_seconds={}, scene_step=-1,
        )  # fmt: skip
        self.endpoint.metrics.stand(self.step, standing)

    def _note(self, alert: str, now: float, *, holds: bool) -> None:
        spans = self.states.get(alert, [])
        lasts = bool(spans) and math.isinf(spans[-1][1])
        if holds and not lasts:
            self.states.setdefault(alert, []).append([now, math.inf])
        elif lasts and not holds:
            spans[-1][1] = now


def play(
    parts: Iterable[tuple[SimulatedRun, Series]],
    *,
    clock: Clock = time.monotonic,
    wait: Callable[[float], object] | None = None,
) -> None:
    """Step each run on its own schedule until its series ends.

    In a series, a number is a pause in which the run makes no step, and a callable is called in its place.
    """
    wait = wait or threading.Event().wait
    began = clock()
    due = [(began, number, run, series) for number, (run, series) in enumerate(parts)]
    heapq.heapify(due)
    while due:
        when, number, run, series = heapq.heappop(due)
        if (early := when - clock()) > 0.0:
            wait(early)
        told = next(series, None)
        if told is None:
            continue
        if isinstance(told, Signals):
            run.take(told)
            when += 1.0 / run.steps_per_second
        elif isinstance(told, float):
            when += told
        else:
            told()
        heapq.heappush(due, (when, number, run, series))
