"""Rule files and routes as objects of the Prometheus operator: the same rules, in the form that a cluster takes."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

# As in kustomization.yaml. Every alert carries it as a label: the operator adds a matcher for it to each route.
NAMESPACE = "training"
_FOLDER = "kubernetes"
_RECEIVER = "http://receiver:9402/alertmanager"
_TOKEN = {"authorization": {"type": "Bearer", "credentials": {"name": "receiver-token", "key": "receiver_token"}}}
_MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"(.*)"')


def to_kubernetes(contents: Mapping[str, bytes], rules: str) -> dict[str, bytes]:
    """A PrometheusRule for each rule file that prometheus.yml loads, and an AlertmanagerConfig, by their paths.

    Args:
        contents: the packaged files by their paths.
        rules: the folder of the rules in them.
    """
    loaded = yaml.safe_load(contents[f"{rules}/prometheus.yml"])["rule_files"]
    objects = [_rule_object(name, yaml.safe_load(contents[f"{rules}/{name}"])) for name in loaded]
    routes = _config_object(yaml.safe_load(contents[f"{rules}/alertmanager.yml"]))
    return {
        f"{rules}/{_FOLDER}/prometheus-rules.yaml": _to_yaml(objects, "the rule files beside this folder"),
        f"{rules}/{_FOLDER}/alertmanager-config.yaml": _to_yaml([routes], "alertmanager.yml beside this folder"),
    }


def _rule_object(name: str, content: dict[str, Any]) -> dict[str, Any]:
    groups = [group | {"rules": [_with_namespace(rule) for rule in group["rules"]]} for group in content["groups"]]
    return _object("monitoring.coreos.com/v1", "PrometheusRule", name.partition(".")[0], {"groups": groups})


def _with_namespace(rule: dict[str, Any]) -> dict[str, Any]:
    return rule | {"labels": rule["labels"] | {"namespace": NAMESPACE}} if "alert" in rule else rule


def _config_object(content: dict[str, Any]) -> dict[str, Any]:
    spec = {
        "route": _route(content["route"]),
        "receivers": [_receiver(receiver) for receiver in content["receivers"]],
        "inhibitRules": [
            {
                "sourceMatch": _matchers(rule["source_matchers"]),
                "targetMatch": _matchers(rule["target_matchers"]),
                "equal": rule.get("equal", []),
            }
            for rule in content["inhibit_rules"]
        ],
    }
    return _object("monitoring.coreos.com/v1alpha1", "AlertmanagerConfig", "alertmanager", spec)


def _route(route: dict[str, Any]) -> dict[str, Any]:
    names = {
        "receiver": "receiver",
        "group_by": "groupBy",
        "group_wait": "groupWait",
        "group_interval": "groupInterval",
        "repeat_interval": "repeatInterval",
        "continue": "continue",
    }
    read = {theirs: route[ours] for ours, theirs in names.items() if ours in route}
    if "matchers" in route:
        read["matchers"] = _matchers(route["matchers"])
    if "routes" in route:
        read["routes"] = [_route(child) for child in route["routes"]]
    return read


def _receiver(receiver: dict[str, Any]) -> dict[str, Any]:
    hooks = [
        {"url": _RECEIVER, "sendResolved": hook["send_resolved"], "maxAlerts": hook["max_alerts"], "httpConfig": _TOKEN}
        for hook in receiver.get("webhook_configs", ())
    ]
    return {"name": receiver["name"]} | ({"webhookConfigs": hooks} if hooks else {})


def _matchers(lines: list[str]) -> list[dict[str, str]]:
    found = [_MATCHER.fullmatch(line) for line in lines]
    return [{"name": each[1], "matchType": each[2], "value": each[3]} for each in found if each is not None]


def _object(version: str, kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/part-of": "pretraining-guard"}
    metadata = {"name": f"pretraining-guard-{name}", "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


class _Dumper(yaml.SafeDumper):
    """Without anchors, and with lines as lines."""

    def ignore_aliases(self, _: Any) -> bool:  # noqa: ANN401 - whatever YAML holds
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _to_yaml(objects: list[dict[str, Any]], source: str) -> bytes:
    head = f"# Made by `python -m exporter files` from {source}: change them there.\n"
    return (head + yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)).encode()
