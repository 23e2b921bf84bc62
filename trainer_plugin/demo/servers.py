"""Real servers around a run: the receiver, Alertmanager and Prometheus on free loopback ports, ended with the run."""

import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.parse
from collections.abc import Collection
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import yaml

from trainer_plugin.demo.process import LostPortError, Process, free_addresses, local_opener
from trainer_plugin.faults.driver import FakeDriver

Name = Literal["receiver", "alertmanager", "prometheus", "gpu"]

_START_SECONDS = 30.0
_END_SECONDS = 5.0
_ATTEMPTS = 3
# Whoever ships a configuration writes the usual ports; that is how an address in it is known.
_USUAL_PORTS: dict[str, Name] = {"9402": "receiver", "9093": "alertmanager", "9090": "prometheus", "9400": "gpu"}
_PROCESSES: tuple[Name, ...] = ("receiver", "alertmanager", "prometheus")
_USUAL_ADDRESS = re.compile(rf"[\w.-]+:({'|'.join(_USUAL_PORTS)})(?!\d)")


@dataclass(frozen=True, kw_only=True)
class Servers:
    """Paths of the server programs."""

    prometheus: str
    alertmanager: str


def find_servers() -> Servers | None:
    """Prometheus and Alertmanager on the PATH, or in `.tools/usr/bin` here or in the repository; None unless both."""
    folders = [Path.cwd(), Path(__file__).resolve().parents[2]]
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *(str(f / ".tools/usr/bin") for f in folders)])
    prometheus = shutil.which("prometheus", path=path)
    alertmanager = shutil.which("prometheus-alertmanager", path=path) or shutil.which("alertmanager", path=path)
    if prometheus is None or alertmanager is None:
        return None
    return Servers(prometheus=str(Path(prometheus).absolute()), alertmanager=str(Path(alertmanager).absolute()))


class Watcher:
    """A Prometheus by its address, and what fires in it."""

    def __init__(self, url: str) -> None:
        self.urls: dict[Name, str] = {"prometheus": url.rstrip("/")}

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that are pending or firing in Prometheus, as its API tells them."""
        found: list[dict[str, Any]] = self._get("/api/v1/alerts")["alerts"]
        return found

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The result of an instant query: series with `metric` and `value`.

        Raises:
            ValueError: Prometheus refuses the query; the message is its own.
        """
        found: list[dict[str, Any]] = self._get(f"/api/v1/query?{urllib.parse.urlencode({'query': promql})}")["result"]
        return found

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with local_opener.open(self.urls["prometheus"] + path, timeout=10) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.HTTPError as error:
            with error:
                raise ValueError(error.read().decode(errors="replace")) from None


class Stack:
    """The receiver, Alertmanager and Prometheus, running the configuration that is shipped.

    Of that configuration only addresses, paths and intervals are changed; it is written to `folder`, beside the logs
    and data of the servers. Enter it on a thread that outlives it: the servers die with that thread.

    Args:
        folder: made if it does not exist.
        runs: folder of the runs that the receiver serves; its `targets/` is what Prometheus scrapes.
        rules_dir: the shipped `alert_rules`, as a path or a package resource.
        scrape_seconds: between two scrapes.
        evaluation_seconds: between two evaluations of the rules.
        servers: the programs; looked for if None.
        driver: a fake NVIDIA driver, which the receiver's process alone meets, and whose GPUs it shows; none if None.
    """

    def __init__(
        self,
        folder: Path,
        runs: Path,
        rules_dir: Traversable,
        *,
        scrape_seconds: float = 1.0,
        evaluation_seconds: float = 1.0,
        servers: Servers | None = None,
        driver: FakeDriver | None = None,
    ) -> None:
        found = servers or find_servers()
        if found is None:
            raise FileNotFoundError("prometheus and prometheus-alertmanager wanted on the PATH or in .tools/usr/bin")
        self._servers = found
        self._folder = folder.resolve()
        self._runs = runs.resolve()
        self._rules_dir = rules_dir
        self._scrape = f"{round(scrape_seconds * 1000)}ms"
        self._evaluation = f"{round(evaluation_seconds * 1000)}ms"
        self._driver = driver
        self._gpu_address: str | None = None
        self._commands: dict[Name, list[str]] = {}
        self._processes: dict[Name, Process] = {}

    def __enter__(self) -> Self:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._start()
                break
            except LostPortError:
                self._end()
                if attempt == _ATTEMPTS:
                    raise
            except BaseException:
                self._end()
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    @property
    def urls(self) -> dict[Name, str]:
        """Where each server listens, and the page of GPUs if there is one, without a slash at the end."""
        found: dict[Name, str] = {name: f"http://{process.address}" for name, process in self._processes.items()}
        return found if self._gpu_address is None else found | {"gpu": f"http://{self._gpu_address}"}

    def kill(self, name: Name) -> None:
        """Kill one server, as kill -9 does."""
        self._processes[name].kill()

    def start_again(self, name: Name) -> None:
        """Start a killed server again, on its address and its data, without waiting for it."""
        self._launch(name, self._processes[name].address)

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that are pending or firing in Prometheus; see `Watcher`."""
        return Watcher(self.urls["prometheus"]).alerts()

    def query(self, promql: str) -> list[dict[str, Any]]:
        """The result of an instant query; see `Watcher`."""
        return Watcher(self.urls["prometheus"]).query(promql)

    def _start(self) -> None:
        names: tuple[Name, ...] = _PROCESSES if self._driver is None else (*_PROCESSES, "gpu")
        addresses = dict(zip(names, free_addresses(len(names)), strict=True))
        self._gpu_address = addresses.get("gpu")
        configs = self._write_configs(addresses)
        data = {name: str(self._folder / f"{name}-data") for name in _PROCESSES}
        for path in data.values():
            shutil.rmtree(path, ignore_errors=True)
        self._commands = {
            "receiver": [sys.executable, "-m", "exporter", "--config", configs["receiver"]],
            "alertmanager": [
                self._servers.alertmanager,
                f"--config.file={configs['alertmanager']}",
                f"--storage.path={data['alertmanager']}",
                f"--web.listen-address={addresses['alertmanager']}",
                "--cluster.listen-address=",
            ],
            "prometheus": [
                self._servers.prometheus,
                f"--config.file={configs['prometheus']}",
                f"--storage.tsdb.path={data['prometheus']}",
                f"--web.listen-address={addresses['prometheus']}",
            ],
        }
        self._processes = {}
        for name in _PROCESSES:
            self._launch(name, addresses[name])
        deadline = time.monotonic() + _START_SECONDS
        for process in self._processes.values():
            process.wait_ready(deadline)

    def _launch(self, name: Name, address: str) -> None:
        command = self._commands[name]
        # Programs unpacked by `make tools` find their templates from their own folder; ours are found from here.
        cwd = None if name == "receiver" else Path(command[0]).parent
        environment = self._driver.environment if self._driver is not None and name == "receiver" else None
        log = self._folder / f"{name}.log"
        self._processes[name] = Process(name, command, address, log, cwd, environment=environment)

    def _write_configs(self, addresses: dict[Name, str]) -> dict[Name, str]:
        (self._runs / "targets").mkdir(parents=True, exist_ok=True)
        rules = self._folder / "alert_rules"
        rules.mkdir(parents=True, exist_ok=True)
        for file in self._rules_dir.iterdir():
            if file.is_file():
                (rules / file.name).write_bytes(file.read_bytes())
        shipped = {name: yaml.safe_load((rules / f"{name}.yml").read_text()) for name in ("prometheus", "alertmanager")}
        gpu = {"listen": addresses["gpu"], "mode": "always", "interval_seconds": 1.0} if "gpu" in addresses else "off"
        configs: dict[Name, Any] = {
            "receiver": {"runs": str(self._runs), "receiver": {"listen": addresses["receiver"]}, "gpu": gpu},
            "alertmanager": readdressed(shipped["alertmanager"], addresses),
            "prometheus": readdressed(
                prometheus_config(
                    shipped["prometheus"], rules, self._runs, self._scrape, self._evaluation, served=addresses
                ),
                addresses,
            ),
        }
        paths: dict[Name, str] = {}
        for name, config in configs.items():
            path = self._folder / f"{'exporter' if name == 'receiver' else name}.yml"
            path.write_text(yaml.safe_dump(config, sort_keys=False))
            paths[name] = str(path)
        return paths

    def _end(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        try:
            for process in self._processes.values():
                process.terminate()
            for process in self._processes.values():
                process.end(deadline)
        finally:
            # Also where a second Ctrl-C cuts the waiting short.
            for process in self._processes.values():
                process.kill()


def readdressed(node: Any, addresses: dict[Name, str]) -> Any:  # noqa: ANN401 - whatever a YAML file may hold
    """The configuration with the true address of our servers wherever it names one by `host:` and its usual port."""
    if isinstance(node, dict):
        return {key: readdressed(value, addresses) for key, value in node.items()}
    if isinstance(node, list):
        return [readdressed(value, addresses) for value in node]
    if isinstance(node, str):
        return _USUAL_ADDRESS.sub(lambda found: addresses[_USUAL_PORTS[found[1]]], node)
    return node


def prometheus_config(
    shipped: dict[str, Any],
    rules: Path,
    runs: Path,
    scrape: str,
    evaluation: str,
    *,
    served: Collection[Name] = _PROCESSES,
) -> dict[str, Any]:
    """The shipped prometheus.yml with these intervals, its rule files in `rules` and its jobs' targets in `runs`.

    A job that scrapes other fixed addresses than those of what is `served` is left out: it would find a stranger there.

    Raises:
        FileNotFoundError: it names a rule file that is not there (Prometheus itself would say nothing).
    """
    for name in shipped["rule_files"]:
        if not any(rules.glob(name)):
            raise FileNotFoundError(f"prometheus.yml: rule file {name} wanted in {rules}, found none")
    targets = {"files": [str(runs / "targets" / "*.json")], "refresh_interval": scrape}
    jobs = []
    for job in shipped["scrape_configs"]:
        if "file_sd_configs" in job:
            jobs.append(job | {"scrape_interval": scrape, "file_sd_configs": [targets]})
        elif any(_USUAL_PORTS[port] in served for port in _USUAL_ADDRESS.findall(str(job.get("static_configs")))):
            jobs.append(job | {"scrape_interval": scrape})
    return shipped | {
        "global": shipped["global"] | {"scrape_interval": scrape, "evaluation_interval": evaluation},
        "rule_files": [str(rules / name) for name in shipped["rule_files"]],
        "scrape_configs": jobs,
    }
