"""Bodies for the receiver, made up by the schema of its payload or against it, and what must be true of each answer."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.catalog import ACTIONS
from exporter.commands import Inbox, alert_identity
from exporter.message import Message
from exporter.webhook import build_app

NOW = 1772366405.0
TIMES = ["2026-03-01T12:00:00.123456789Z", "2026-03-01T14:00:01+02:00", "2020-01-01T00:00:00Z"]
HOSTILE_RUNS = ["../x", "..", ".", "/etc", "gpt-0/../gpt-0", "gpt-0\0", "a" * 10_000, "lauf-ü", "gpt-0\n", "*", "٣"]
TEXT = st.text(max_size=30)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
LABELS = st.fixed_dictionaries(
    {},
    optional={
        "alertname": st.sampled_from(["TrainLossDrift", "TrainWatchdog"]) | TEXT,
        "action": st.sampled_from([*ACTIONS, "none", ""]) | TEXT,
        "run": st.sampled_from(["gpt-0", *HOSTILE_RUNS[:6]]) | TEXT,
    },
)
# What the schema leaves open and the receiver does not: a time is one, and the labels are those that matter.
_KNOWN = {"startsAt": st.sampled_from(TIMES), "labels": LABELS}


def from_schema(schema: dict[str, Any], known: dict[str, Any], names: dict[str, st.SearchStrategy[Any]]) -> Any:
    """Whatever a JSON schema allows; `known` are its definitions, `names` stand in for the fields of that name."""

    def inner(each: dict[str, Any]) -> st.SearchStrategy[Any]:
        return from_schema(each, known, names)

    def fields() -> st.SearchStrategy[Any]:
        found = {name: names[name] if name in names else inner(each) for name, each in schema["properties"].items()}
        required = {name: found.pop(name) for name in schema["required"]}
        return st.fixed_dictionaries(required, optional=found)

    kinds = {
        "$ref": lambda: inner(known[schema["$ref"].rpartition("/")[2]]),
        "anyOf": lambda: st.one_of(*map(inner, schema["anyOf"])),
        "enum": lambda: st.sampled_from(schema["enum"]),
        "properties": fields,
        "additionalProperties": lambda: st.dictionaries(TEXT, inner(schema["additionalProperties"]), max_size=3),
        "items": lambda: st.lists(inner(schema["items"]), max_size=3),
        "pattern": lambda: st.from_regex(schema["pattern"]),
    }
    plain = {
        "integer": st.integers(schema.get("minimum"), schema.get("maximum")),
        "null": st.none(),
        "string": TEXT,
    }
    kind = next((kind for kind in kinds if kind in schema), None)
    return plain[schema["type"]] if kind is None else kinds[kind]()


def _spoilt(draw: st.DrawFn, value: Any) -> Any:
    """The same with one thing in it, at any depth, taken out, added, or replaced by any other JSON."""
    if isinstance(value, dict) and value and draw(st.integers(0, 3)):
        name = draw(st.sampled_from(sorted(value)))
        how = draw(st.integers(0, 5))
        if how == 0:
            return {key: each for key, each in value.items() if key != name}
        if how == 1:
            return value | {draw(TEXT): draw(JSON)}
        return value | {name: _spoilt(draw, value[name])}
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], _spoilt(draw, value[place]), *value[place + 1 :]]
    return draw(JSON)


@st.composite
def _spoilt_bodies(draw: st.DrawFn) -> bytes:
    return msgspec.json.encode(_spoilt(draw, draw(_MESSAGES)))


_DEFINITIONS = msgspec.json.schema(Message)["$defs"]
_MESSAGES = from_schema(_DEFINITIONS["Message"], _DEFINITIONS, _KNOWN)
VALID = _MESSAGES.map(msgspec.json.encode)
BODIES = st.one_of(
    _spoilt_bodies(),
    st.dictionaries(st.sampled_from(["alerts", "version", "status", "receiver"]), JSON).map(msgspec.json.encode),
    JSON.map(msgspec.json.encode),
    st.binary(max_size=60),
    st.tuples(VALID, st.integers(0, 400), st.binary(max_size=3)).map(
        lambda cut: cut[0][: cut[1]] + cut[2] + cut[0][cut[1] + len(cut[2]) :]
    ),
)


def _may_be_queued(alert: dict[str, Any]) -> bool:
    """Whether a command may come of a well-formed alert, told apart from the code under test."""
    labels = alert["labels"]
    return (
        alert["status"] == "firing"
        and labels.get("alertname") != "TrainWatchdog"
        and labels.get("action") in ACTIONS
        and labels.get("run") == "gpt-0"
        and str(alert["startsAt"]).startswith("2026-03-01T1")
    )


def send_bodies(runs: Path, inbox: Inbox, bodies: st.SearchStrategy[bytes], *, examples: int, valid: bool) -> None:
    """Send so many bodies to a receiver with the run gpt-0, and hold each answer and the inbox against them."""
    app = build_app(runs, now=lambda: NOW)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://receiver")

    @settings(max_examples=examples, deadline=None, database=None)
    @given(body=bodies)
    def send(body: bytes) -> None:
        response = runner.run(client.post("/alertmanager", content=body))
        assert response.status_code == 200 or (response.status_code == 400 and not valid)
        queued = set()
        if response.status_code == 200:
            for alert, answer in zip(msgspec.json.decode(body)["alerts"], response.json()["alerts"], strict=True):
                assert (answer["outcome"] in ("queued", "duplicate")) == _may_be_queued(alert)
                if answer["outcome"] == "queued":
                    queued.add(alert_identity(alert["fingerprint"], alert["startsAt"]))
        commands = inbox.waiting()
        assert {command.id for command in commands} == queued
        assert all(command.run == "gpt-0" and command.action in ACTIONS for command in commands)
        files = {path for path in runs.parent.rglob("*") if path.is_file()} - {runs / "gpt-0" / "heartbeat.json"}
        assert files == {inbox.new / f"{name}.json" for name in queued}
        for file in files:
            file.unlink()

    with asyncio.Runner() as runner:
        send()
