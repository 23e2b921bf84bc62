"""The demo from end to end: servers, a guarded training that breaks, its fault-free twin, and a report."""

import os
import time
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from exporter.commands import Inbox
from trainer_plugin.config import Config, read_config
from trainer_plugin.demo.job import train_guarded, train_twin
from trainer_plugin.demo.machine import FakeMachine, PlayedMachine, find_driver
from trainer_plugin.demo.result import Result, read_incidents, versions, write_json
from trainer_plugin.demo.scenarios import SCENARIOS, Scenario
from trainer_plugin.demo.servers import Servers, Stack, Watcher, find_servers
from trainer_plugin.demo.text import Corpus
from trainer_plugin.demo.timeline import Timeline
from trainer_plugin.faults import Faults
from trainer_plugin.faults.driver import FakeDriver, uuid
from trainer_plugin.guard import Guard
from trainer_plugin.report.command import run_report
from trainer_plugin.run_folder import RunLock

RUN = "demo"


def run_demo(
    *,
    scenario_name: str,
    steps: int | None,
    seed: int,
    out: Path | None,
    local_only: bool,
    json_path: Path | None,
    config_path: Path | None,
    prometheus: str | None = None,
) -> int:
    """Run one scenario; 0 when it went as it must, 1 when it did not.

    With the address of a `prometheus`, no servers are started: those that are there act. The run then is a new one in
    the `runs` of the config, which they watch.

    Raises:
        ValueError: an argument or the config cannot be used; nothing has been made.
        OSError: a folder cannot be made or written.
        RunInUseError: another demo runs in `out`.
    """
    scenario = SCENARIOS[scenario_name]
    steps = scenario.steps if steps is None else steps
    if steps < scenario.least_steps:
        raise ValueError(f"--steps must be at least {scenario.least_steps} for {scenario.name}, found {steps}")
    if not 0 <= seed < 1 << 32:
        raise ValueError(f"--seed must be 0 to {(1 << 32) - 1}, found {seed}")
    out = out or Path("demo-out") / f"{scenario.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    config = _config(config_path, out.absolute(), named=prometheus is not None)
    _make_folder(out)
    if json_path is not None:
        json_path.touch()  # Found out now, not after minutes of training.

    servers = None if local_only or prometheus is not None else find_servers()
    if servers is None and not local_only and prometheus is None:
        print("no prometheus and prometheus-alertmanager here (`make tools` fetches them): going on as --local-only")
    driver = find_driver(out / "driver") if scenario.breaks_gpu and servers is not None else None
    if driver is not None:
        config = replace(config, metrics=replace(config.metrics, gpu_uuid=uuid(0)))
        print("the receiver's process alone meets a fake NVIDIA driver; what comes after it is real")
    elif scenario.breaks_gpu and servers is None:
        print("no servers of its own: the demo plays the alert about the GPU by a note in the run's inbox")
    (out / "guard.yaml").write_text(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False))
    print(f"{scenario.name}: {scenario.story}")
    corpus = Corpus.load()
    result = _train(
        scenario, corpus, config, steps=steps, seed=seed, out=out, servers=servers, prometheus=prometheus, driver=driver
    )
    text = result.to_text(out)
    print(f"\n{text}")
    (out / "report.txt").write_text(text + "\n")
    _write_report(Path(config.runs) / config.run, out / "report.html")
    write_json(out / "demo.json", result.to_json())
    if json_path is not None:
        write_json(json_path, result.to_json())
    return 1 if result.problems() else 0


def _write_report(run_folder: Path, path: Path) -> None:
    """The page about the run, where matplotlib is there to draw it."""
    try:
        run_report(run_folder, path)
    except ValueError as error:
        print(f"no report.html: {error}")


def _train(
    scenario: Scenario,
    corpus: Corpus,
    config: Config,
    *,
    steps: int,
    seed: int,
    out: Path,
    servers: Servers | None,
    prometheus: str | None,
    driver: FakeDriver | None,
) -> Result:
    began = time.monotonic()
    run_folder = Path(config.runs) / config.run
    faults = Faults(seed=seed)
    with ExitStack() as ends:
        stack: Stack | Watcher | None = None if prometheus is None else Watcher(prometheus)
        if servers is not None:
            own = Stack(out / "servers", Path(config.runs), files("alert_rules"), servers=servers, driver=driver)
            stack = ends.enter_context(own)
        timeline = Timeline(run_folder, stack, began=began)
        ends.callback(timeline.stop)
        machine = _machine(driver, run_folder, timeline, faults)
        scenario.inject(faults, machine)
        if stack is not None:
            timeline.tell("servers", ", ".join(f"{name} {url}" for name, url in stack.urls.items()))
        told: list[bool] = []

        def on_step(step: int, loss: float) -> None:
            timeline.progress(step, loss)
            if not told and scenario.fault is not None and faults.first_step(scenario.fault) is not None:
                told.append(True)
                timeline.tell("fault", scenario.story, step=faults.first_step(scenario.fault))

        def on_start(guard: Guard) -> None:
            timeline.tell("metrics", f"http://{config.metrics.host}:{guard.metrics_port}/metrics")
            timeline.start()

        guarded = train_guarded(
            corpus,
            config,
            seed=seed,
            steps=steps,
            faults=faults,
            local_only=stack is None,
            on_start=on_start,
            on_step=on_step,
        )
    twin_line = Timeline(run_folder, None, began=began)
    twin_line.tell("twin", "the same seed without the fault and without the guard, to compare with")
    twin = train_twin(corpus, seed=seed, steps=steps, read_after=guarded.applied_steps, on_step=twin_line.progress)
    return Result(
        scenario=scenario,
        seed=seed,
        steps=steps,
        mode="prometheus" if stack is not None else "local",
        versions=versions(servers),
        faults=faults,
        incidents=read_incidents(run_folder),
        trail=timeline.trail,
        alerts=timeline.alerts,
        pages=timeline.pages,
        guarded=guarded,
        twin=twin,
    )


def _machine(
    driver: FakeDriver | None, run_folder: Path, timeline: Timeline, faults: Faults
) -> FakeMachine | PlayedMachine:
    """What makes a GPU's fault known."""
    if driver is None:
        return PlayedMachine(run_folder, lambda: faults.steps_run)
    return FakeMachine(driver, Inbox(run_folder), lambda text: timeline.tell("driver", text, step=faults.steps_run + 1))


def _config(path: Path | None, out: Path, *, named: bool) -> Config:
    """The demo's options, with those of a guard.yaml over them; folders are always in `out`.

    `named`: the run is called like `out`, in the `runs` of that guard.yaml if it has any.
    """
    checkpoints = {"every": 100, "keep_local": 20, "keep_shared": 20}
    options: dict[str, Any] = {"metrics": {"port": 0}, "checkpoints": checkpoints}
    if path is not None:
        read_config(path)
        theirs = yaml.safe_load(path.read_text()) or {}
        for key, value in theirs.items():
            options[key] = {**options.get(key, {}), **value} if isinstance(value, dict) else value
    runs = options.get("runs") if named else None
    options |= {"run": out.name if named else RUN, "runs": runs or str(out / "runs")}
    options["checkpoints"] = options["checkpoints"] | {
        "local": str(out / "checkpoints" / "local"),
        "shared": str(out / "checkpoints" / "shared"),
    }
    return read_config(options)


def _make_folder(out: Path) -> None:
    """Make the demo's folder, which must be new or empty."""
    if any(sign in str(out) for sign in "*?[]"):
        raise ValueError(f"--out must hold none of * ? [ ], which Prometheus reads as patterns, found {out}")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK | os.X_OK):
        raise PermissionError(f"--out {out} cannot be written")
    lock = out / "runs" / RUN / "lock"
    if lock.exists():
        RunLock(lock).release()  # Raises if a demo is under way in it.
    if any(out.iterdir()):
        raise ValueError(f"--out must be a new or empty folder, found files in {out}")
