"""A real Alertmanager on the shipped configuration, and a sink that keeps what it sends to the job and to people."""

import itertools
import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml
from loopback import Loopback
from waiting import wait_for

from trainer_plugin.demo.process import Process, free_addresses
from trainer_plugin.demo.servers import find_servers, readdressed

RULES = Path(__file__).resolve().parents[1] / "alert_rules"
RULE_LABELS = {
    rule["alert"]: rule["labels"]
    for path in RULES.glob("*.yml")
    for group in yaml.safe_load(path.read_text()).get("groups", ())
    for rule in group["rules"]
    if "alert" in rule
}
# By so much the routes for people are quicker here than as shipped.
HURRY = 30
_START_SECONDS = 30.0
_UNITS = {"s": 1, "m": 60, "h": 3600}


def until(condition: Callable[[], object], seconds: float = 40.0) -> None:
    """Look ten times a second until something is so, on a machine that may be busy.

    Raises:
        TimeoutError: it did not come.
    """
    wait_for(condition, seconds, pause_seconds=0.1)


class Sink:
    """A server that says 200 to every POST and keeps them: path, JSON, and when, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self.got: list[tuple[str, Any, float]] = []
        self._server = Loopback(self._take)
        self.address = self._server.address

    def _take(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        self.got.append((handler.path, json.loads(body), time.monotonic()))
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(b"ok")  # As Slack says it; newer versions of Alertmanager read that.

    def close(self) -> None:
        """Free the port."""
        self._server.close()

    def bodies(self, path: str) -> list[Any]:
        """What came to a path."""
        return [body for there, body, _ in self.got if there == path]

    def commands(self, run: str) -> list[tuple[str, str]]:
        """Name and status of each alert of a run that came by webhook for the job, in order."""
        alerts = [alert for body in self.bodies("/alertmanager") for alert in body["alerts"]]
        return [
            (alert["labels"]["alertname"], alert["status"]) for alert in alerts if alert["labels"].get("run") == run
        ]

    def chats(self, run: str) -> list[str]:
        """The titles of the chat's messages about a run."""
        titles = [attachment["title"] for body in self.bodies("/chat") for attachment in body["attachments"]]
        return [title for title in titles if f"run {run}:" in title]

    def pages(self, run: str) -> list[tuple[str, str, str]]:
        """What the pager got about a run: the page's key, what happens to it, and its title where there is one."""
        events = self.bodies("/pager")
        keys = {event["dedup_key"] for event in events if f"run {run}:" in event.get("payload", {}).get("summary", "")}
        return [
            (event["dedup_key"], event["event_action"], event.get("payload", {}).get("summary", ""))
            for event in events
            if event["dedup_key"] in keys
        ]

    def logs(self, run: str) -> list[str]:
        """The alerts about a run that came to the log."""
        alerts = [alert for body in self.bodies("/log") for alert in body["alerts"]]
        return [alert["labels"]["alertname"] for alert in alerts if alert["labels"].get("run") == run]


def configuration(folder: Path, sink: Sink) -> dict[str, Any]:
    """The shipped configuration with all its examples taken up, sent to the sink, people's routes in a hurry."""
    config = yaml.safe_load((RULES / "alertmanager.yml").read_text().replace("#: ", ""))
    config = readdressed(config, {"receiver": sink.address})
    config["global"] = {"pagerduty_url": f"http://{sink.address}/pager"}
    config["templates"] = [str(RULES / "messages.tmpl")]
    for name, secret in (("key", "k"), ("url", f"http://{sink.address}/chat"), ("token", "t")):
        (folder / name).write_text(secret)
    receivers = {receiver["name"]: receiver for receiver in config["receivers"]}
    for hook in receivers["job"]["webhook_configs"] + receivers["heartbeat"]["webhook_configs"][:1]:
        hook["http_config"]["authorization"]["credentials_file"] = str(folder / "token")
    receivers["heartbeat"]["webhook_configs"][1]["url"] = f"http://{sink.address}/watch"
    receivers["pager"]["pagerduty_configs"][0]["routing_key_file"] = str(folder / "key")
    receivers["chat"]["slack_configs"][0]["api_url_file"] = str(folder / "url")
    receivers["log"]["webhook_configs"][0]["url"] = f"http://{sink.address}/log"
    for route in (config["route"], *config["route"]["routes"]):
        if route["receiver"] not in ("job", "heartbeat"):
            for key in ("group_wait", "group_interval", "repeat_interval"):
                if key in route:
                    route[key] = f"{int(route[key][:-1]) * _UNITS[route[key][-1]] * 1000 // HURRY}ms"
    return config


class Alertmanager:
    """A running Alertmanager, to which alerts are posted as Prometheus posts them."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        servers = find_servers()
        assert servers is not None, "prometheus-alertmanager wanted: run `make tools`"
        (self.address,) = free_addresses(1)
        path = folder / "alertmanager.yml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        command = [
            servers.alertmanager,
            f"--config.file={path}",
            f"--storage.path={folder / 'alertmanager-data'}",
            f"--web.listen-address={self.address}",
            "--cluster.listen-address=",
        ]
        log, cwd = folder / "alertmanager.log", Path(servers.alertmanager).parent
        self._process = Process("alertmanager", command, self.address, log, cwd)
        self._since: dict[str, str] = {}
        try:
            self._process.wait_ready(time.monotonic() + _START_SECONDS)
        except BaseException:
            self._process.kill()
            raise

    def close(self) -> None:
        """End it."""
        self._process.kill()

    def fire(self, *names: str, runs: Sequence[str] = (), status: str = "firing", **labels: str) -> None:
        """Post alerts of these runs with the labels of their rules and these, in one message; `resolved` ends them."""
        now = datetime.now(UTC)
        alerts = []
        for name, run in itertools.product(names, runs or [""]):
            full = {"alertname": name, **RULE_LABELS[name], **({"run": run} if run else {}), **labels}
            alert = {
                "labels": full,
                "annotations": {
                    "summary": f"Summary of {name}.",
                    "description": f"What is the case with {name}.",
                    "step": "1240",
                    "runbook_url": f"runbook.md#{name.lower()}",
                },
                "startsAt": self._since.setdefault(str(sorted(full.items())), now.isoformat()),
                # Prometheus says 4 minutes from now, and says it again every minute.
                "endsAt": (now + timedelta(hours=1)).isoformat(),
            }
            if status == "resolved":
                alert["endsAt"] = now.isoformat()
                del self._since[str(sorted(full.items()))]
            alerts.append(alert)
        request = urllib.request.Request(
            f"http://{self.address}/api/v2/alerts",
            data=json.dumps(alerts).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10):  # noqa: S310
            pass

    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that it has, and whether each is muted, as its API tells them."""
        with urllib.request.urlopen(f"http://{self.address}/api/v2/alerts", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)
            return found

    def muted(self, **labels: str) -> dict[str, bool]:
        """Whether each alert with these labels is inhibited now, by its name."""
        return {
            alert["labels"]["alertname"]: bool(alert["status"]["inhibitedBy"])
            for alert in self.alerts()
            if labels.items() <= alert["labels"].items()
        }
