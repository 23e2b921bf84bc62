"""The receiver: what Alertmanager sends becomes commands once, and nothing else that is sent becomes anything."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest
from payloads import BODIES, HOSTILE_RUNS, VALID, send_bodies
from starlette.applications import Starlette
from waiting import wait_for

from exporter.access import Credentials
from exporter.catalog import ACTIONS
from exporter.commands import MAX_COMMAND_BYTES, Command, Inbox, Record, alert_identity
from exporter.message import plain, step_number
from exporter.receiver_metrics import DELIVERY_OUTCOMES
from exporter.runs import Heartbeat, RunFolder
from exporter.webhook import MAX_BODY_BYTES, build_app

TOKEN = b"s3cret"
STARTS_AT = "2026-03-01T12:00:00.123456789Z"
STARTED = 1772366400.123457  # The same in Unix seconds, to the microsecond.
# More than 64 bits, and than a float holds; the encoder does not write it.
_HUGE_CUT = b'{"alerts": [], "truncatedAlerts": 1%s}' % (b"0" * 400)


def _alert(**changes: object) -> dict[str, object]:
    alert: dict[str, object] = {
        "status": "firing",
        "labels": {"alertname": "TrainLossSpikeSustained", "action": "rollback", "run": "gpt-0", "severity": "page"},
        "annotations": {"summary": "loss is 4 x its baseline", "step": "1.234e+03", "steps_total": "1300"},
        "startsAt": STARTS_AT,
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "http://prometheus:9090/graph",
        "fingerprint": "0123456789abcdef",
    }
    return alert | changes


def _labelled(**labels: str) -> dict[str, object]:
    base = {"alertname": "TrainLossSpikeSustained", "action": "rollback", "run": "gpt-0"} | labels
    return _alert(labels={name: value for name, value in base.items() if value})


def _message(*alerts: object, **changes: object) -> bytes:
    message: dict[str, object] = {
        "version": "4",
        "groupKey": '{}/{action!=""}:{alertname="TrainLossSpikeSustained"}',
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "guard",
        "groupLabels": {},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "http://alertmanager:9093",
        "notification_reason": "first notification",
        "alerts": list(alerts),
    }
    return msgspec.json.encode(message | changes)


def _request(app: Starlette, method: str, path: str, *, crash: bool = True, **more: object) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=crash)
        async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
            return await client.request(method, path, **more)

    return asyncio.run(send())


def _post(app: Starlette, body: bytes, **more: object) -> httpx.Response:
    return _request(app, "POST", "/alertmanager", content=body, **more)


def _answers(response: httpx.Response) -> list[dict[str, str]]:
    assert response.status_code == 200, response.text
    return response.json()["alerts"]


def _outcome(app: Starlette, *alerts: object) -> str:
    return " ".join(answer["outcome"] for answer in _answers(_post(app, _message(*alerts))))


def _counts(app: Starlette) -> dict[str, int]:
    lines = _request(app, "GET", "/metrics").text.splitlines()
    found = [line.split('outcome="')[1].split('"} ') for line in lines if line.startswith("receiver_deliveries_total{")]
    return {outcome: int(float(value)) for outcome, value in found if float(value)}


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self) -> None:
        self.seconds = STARTED + 2

    def __call__(self) -> float:
        """The time it is set to."""
        return self.seconds


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A runs folder with the run gpt-0."""
    RunFolder(tmp_path / "runs", "gpt-0").inbox.create()
    return tmp_path / "runs"


@pytest.fixture
def inbox(runs: Path) -> Inbox:
    """The inbox of gpt-0."""
    return Inbox(runs / "gpt-0")


@pytest.fixture
def clock() -> Clock:
    """Two seconds after the alert began."""
    return Clock()


@pytest.fixture
def app(runs: Path, clock: Clock) -> Starlette:
    """A receiver without a token."""
    return build_app(runs, now=clock)


def test_an_alert_becomes_a_command(app, inbox, clock):
    """Everything that the job needs to judge the alert is in the command."""
    (answer,) = _answers(_post(app, _message(_alert())))
    assert answer == {
        "fingerprint": "0123456789abcdef",
        "alert": "TrainLossSpikeSustained",
        "run": "gpt-0",
        "outcome": "queued",
    }
    assert inbox.waiting() == [
        Command(
            id=alert_identity("0123456789abcdef", STARTS_AT),
            run="gpt-0",
            action="rollback",
            source="alert",
            received=clock.seconds,
            alert="TrainLossSpikeSustained",
            step=1234,
            steps_total=1300,
            starts_at=STARTED,
            reason="loss is 4 x its baseline",
        )
    ]


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_can_be_asked_for(app, inbox, action):
    """Each word of the catalog is taken as it is."""
    assert _outcome(app, _labelled(action=action)) == "queued"
    assert [command.action for command in inbox.waiting()] == [action]


def test_each_alert_of_a_delivery_is_judged_alone(app, inbox, runs):
    """The answers come in the order of the alerts, and every outcome is counted."""
    alerts = [
        _alert(),
        _alert(),
        _alert(fingerprint="1"),
        _alert(status="resolved"),
        _labelled(run="absent"),
        _labelled(alertname="TrainWatchdog", action=""),
        _alert(fingerprint="2", startsAt="2026-02-26T12:00:00Z"),
    ]
    expected = "queued duplicate queued not_actionable unknown_run heartbeat stale"
    assert _outcome(app, *alerts) == expected
    assert len(inbox.waiting()) == 2
    counts = {"queued": 2} | dict.fromkeys(set(expected.split()) - {"queued"}, 1)
    assert _counts(app) == counts
    assert [path.name for path in runs.iterdir()] == ["gpt-0"]


def test_an_empty_delivery_is_fine(app):
    """A message without alerts changes nothing."""
    assert _answers(_post(app, _message())) == []


def test_w01_two_senders_at_once_make_one_command(app, inbox):
    """The same payload from two threads at once is queued once, and a duplicate once, with two 200s."""
    barrier = threading.Barrier(2)

    def send(_: int) -> str:
        barrier.wait()
        return _outcome(app, _alert())

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(send, range(2))) == ["duplicate", "queued"]
    assert len(inbox.waiting()) == 1
    assert _counts(app) == {"queued": 1, "duplicate": 1}


@pytest.mark.parametrize(
    ("starts_at", "started"),
    [
        (STARTS_AT, STARTED),
        ("2026-03-01T14:00:00.5+02:00", 1772366400.5),
        ("2026-03-01T04:00:00.000000001-08:00", 1772366400.0),
        ("2026-03-01T12:00:00Z", 1772366400.0),
    ],
)
@pytest.mark.parametrize("ends_at", ["0001-01-01T00:00:00Z", "2026-03-01T12:04:00.123456789+02:00", None])
def test_w03_time_stamps_of_every_shape_are_read(app, inbox, starts_at, started, ends_at):
    """Nanoseconds, offsets and the end in year 1 are understood, and a firing alert is not over."""
    assert _outcome(app, _alert(startsAt=starts_at, endsAt=ends_at)) == "queued"
    assert [command.starts_at for command in inbox.waiting()] == [started]
    assert [command.id for command in inbox.waiting()] == [alert_identity("0123456789abcdef", starts_at)]


def test_w03_a_start_in_year_one_is_only_old(app, inbox):
    """The zero time overflows nothing."""
    assert _outcome(app, _alert(startsAt="0001-01-01T00:00:00+14:00")) == "stale"
    assert inbox.waiting() == []


def test_w09_repeats_are_one_command_and_a_new_start_is_another(app, inbox, clock):
    """Five deliveries of one firing are one command, also after the job has decided it; the next firing is new."""
    outcomes = []
    for _ in range(5):
        outcomes.append(_outcome(app, _alert()))
        clock.seconds += 240
        for command in inbox.waiting():
            inbox.finish(Record(command=command, outcome="done", decided=clock.seconds, at_step=1))
    assert outcomes == ["queued"] + ["duplicate"] * 4
    assert _outcome(app, _alert(startsAt="2026-03-01T12:19:00Z")) == "queued"
    assert len(inbox.records()) == 1


@pytest.mark.parametrize("age", [3 * 86400, 11 * 60, 600.5])
def test_w10_an_old_alert_seen_first_is_not_acted_on(app, inbox, clock, age):
    """Three days or eleven minutes late is too late, with a 200 and a word on why."""
    clock.seconds = STARTED + age
    (answer,) = _answers(_post(app, _message(_alert())))
    assert answer["outcome"] == "stale"
    assert "began" in answer["detail"]
    assert inbox.waiting() == []
    assert _counts(app) == {"stale": 1}


def test_w10_the_limit_itself_is_in_time(runs, clock, inbox):
    """An alert as old as the setting allows is acted on, a second later it is not."""
    app = build_app(runs, now=clock, stale_after_seconds=30)
    clock.seconds = STARTED + 30
    assert _outcome(app, _alert()) == "queued"
    clock.seconds += 1
    assert _outcome(app, _alert(fingerprint="2")) == "stale"
    assert len(inbox.waiting()) == 1


def test_w10_an_old_alert_that_is_known_is_a_duplicate(app, clock):
    """Alertmanager repeats an alert for as long as it fires: that is no reason to call it stale."""
    assert _outcome(app, _alert()) == "queued"
    clock.seconds = STARTED + 3 * 86400
    assert _outcome(app, _alert()) == "duplicate"


@pytest.mark.parametrize(("ahead", "outcome"), [(299, "queued"), (301, "stale")])
def test_w10_a_start_in_the_future_is_not_trusted(app, clock, ahead, outcome):
    """A little clock skew is forgiven; more would make an alert that never grows old."""
    clock.seconds = STARTED - ahead
    (answer,) = _answers(_post(app, _message(_alert())))
    assert answer["outcome"] == outcome
    assert ("clocks disagree" in answer.get("detail", "")) == (outcome == "stale")


def test_w12_a_new_receiver_knows_what_the_old_one_queued(app, runs, clock, inbox):
    """Deduplication is in the folder: a restarted receiver queues nothing twice."""
    _outcome(app, _alert())
    assert _outcome(build_app(runs, now=clock), _alert()) == "duplicate"
    assert len(inbox.waiting()) == 1


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{}", "alerts"),
        (b"[]", "object"),
        (b"null", "object"),
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b'{"\x80": "", "alerts": []}', "JSON"),
        (b'{"new": "\xff", "alerts": []}', "JSON"),
        (b"alerts=1", "JSON"),
        (b'{"x":' + b"[" * 500_000, "JSON"),
        (_message(alerts=None), "$.alerts"),
        (_message(alerts={}), "$.alerts"),
        (_message(7), "$.alerts[0]"),
        (_message(_alert(), {}), "$.alerts[1]"),
        (_message(_alert(labels=None)), "labels"),
        (_message(_alert(labels=["a"])), "labels"),
        (_message(_alert(labels={"run": 7})), "labels"),
        (_message(_alert(annotations={"step": 7})), "annotations"),
        (_message(_alert(status="pending")), "status"),
        (_message(_alert(fingerprint=None)), "fingerprint"),
        (_message(_alert(fingerprint="")), "fingerprint"),
        (_message(_alert(fingerprint="../x")), "fingerprint"),
        (_message(_alert(fingerprint="a\n")), "fingerprint"),
        (_message(_alert(fingerprint="٣")), "fingerprint"),
        (_message(_alert(fingerprint="a" * 65)), "fingerprint"),
        (_message(_alert(startsAt=None)), "startsAt"),
        (_message(_alert(startsAt=1)), "startsAt"),
        (_message(_alert(startsAt="")), "startsAt"),
        (_message(_alert(startsAt="yesterday")), "startsAt"),
        (_message(_alert(startsAt="2026-03-01T12:00:00")), "startsAt"),
        (_message(_alert(startsAt="9" * 10_000)), "startsAt"),
        (_message(version=None), "version"),
        (_message(truncatedAlerts="many"), "truncatedAlerts"),
    ],
)
def test_w13_what_is_no_message_is_400_and_names_the_field(app, inbox, body, named):
    """The sender learns in one short line which field is wrong, and nothing is queued."""
    response = _post(app, body)
    assert response.status_code == 400
    assert named in response.json()["error"]
    assert "\n" not in response.text
    assert len(response.text) < 300
    assert inbox.waiting() == []
    assert _counts(app) == {"bad_request": 1}


def test_w13_a_body_over_the_limit_is_413(app):
    """Ten megabytes are refused, and so is one byte too many."""
    for size in (10_000_000, MAX_BODY_BYTES + 1):
        response = _post(app, b" " * size)
        assert response.status_code == 413
        assert str(size) in response.json()["error"]
    assert _counts(app) == {"too_large": 2}


def test_w13_a_body_without_a_length_is_read_up_to_the_limit_only(app):
    """A chunked body stops being read where it goes over the limit."""
    sent = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            sent.append(65_536)
            yield b" " * 65_536

    assert _post(app, endless()).status_code == 413
    assert sum(sent) <= MAX_BODY_BYTES + 65_536
    assert _counts(app) == {"too_large": 1}


def test_w13_a_body_of_just_the_limit_is_read(app):
    """The limit itself is allowed, with or without a length."""
    body = _message(_alert())
    body += b" " * (MAX_BODY_BYTES - len(body))

    async def chunked() -> AsyncIterator[bytes]:
        yield body

    assert _post(app, body).status_code == 200
    assert _post(app, chunked()).status_code == 200


def test_w13_unknown_fields_are_ignored(app):
    """A newer Alertmanager may send more, at every level."""
    assert _answers(_post(app, _message(_alert(new={"a": [1]}), routeLabels={"a": "b"})))[0]["outcome"] == "queued"


@pytest.mark.parametrize("version", ["5", "", 5])
def test_w13_another_version_is_taken_with_a_warning(app, inbox, version):
    """A version that we do not know is no reason to lose an alert."""
    body = _post(app, _message(_alert(), version=version)).json()
    assert body["alerts"][0]["outcome"] == "queued"
    assert repr(version) in body["warning"]
    assert len(inbox.waiting()) == 1


def test_m06_truncation_is_told_and_counted(app):
    """Alerts that the sender cut off are missed aloud."""
    assert "receiver_alerts_truncated_total 0.0" in _request(app, "GET", "/metrics").text
    assert "3 alerts were cut off" in _post(app, _message(_alert(), truncatedAlerts=3)).json()["warning"]
    assert "warning" not in _post(app, _message(_alert())).json()
    _post(app, _message(_alert(), truncatedAlerts=10_000))
    assert "receiver_alerts_truncated_total 10003.0" in _request(app, "GET", "/metrics").text


@pytest.mark.parametrize("cut", [-1, "3", 1.5, None, 2**60, pytest.param(10**400, id="huge")])
def test_a_number_of_cut_alerts_that_is_none_is_400(app, inbox, cut):
    """A count that no Alertmanager sends does not go backwards or grow without end."""
    response = _post(app, _message(_alert(), truncatedAlerts=cut) if cut != 10**400 else _HUGE_CUT)
    assert (response.status_code, "truncatedAlerts" in response.json()["error"]) == (400, True)
    assert inbox.waiting() == []
    assert "receiver_alerts_truncated_total 0.0" in _request(app, "GET", "/metrics").text


@pytest.mark.parametrize(
    ("alert", "detail"),
    [
        (_alert(status="resolved"), "resolved"),
        (_labelled(alertname="TrainWatchdog", action="") | {"status": "resolved"}, "resolved"),
        (_labelled(action=""), "no label `action`"),
        (_labelled(action="rm -rf /"), "found 'rm -rf /'"),
        (_labelled(action="none"), "found 'none'"),
        (_labelled(action="Rollback"), "wants one of clip, lower_lr"),
        (_labelled(action="x" * 10_000), "found 'xxx"),
        (_labelled(run=""), "no label `run`"),
        (_labelled(run="", alertname="TrainWatchdog"), "no label `run`"),
    ],
)
def test_w13_what_asks_for_nothing_is_not_actionable(app, inbox, runs, alert, detail):
    """No action, no known action, no run or no fire: a 200 that says so, and no command."""
    (answer,) = _answers(_post(app, _message(alert)))
    assert answer["outcome"] == "not_actionable"
    assert detail in answer["detail"]
    assert len(answer["detail"]) < 300
    assert inbox.waiting() == []
    assert not (runs / "gpt-0" / "heartbeat.json").exists()


@pytest.mark.parametrize("run", [*HOSTILE_RUNS, "absent"])
@pytest.mark.parametrize("alertname", ["TrainLossSpikeSustained", "TrainWatchdog"])
def test_w13_no_command_is_put_on_a_guessed_run(app, runs, inbox, run, alertname):
    """A name that is no run's is answered, and touches no file."""
    Inbox(runs.parent / "x").create()
    before = sorted(runs.parent.rglob("*"))
    assert _outcome(app, _labelled(run=run, alertname=alertname)) == "unknown_run"
    assert sorted(runs.parent.rglob("*")) == before
    assert inbox.waiting() == []
    assert _counts(app) == {"unknown_run": 1}
    assert "receiver_last_heartbeat_timestamp_seconds{" not in _request(app, "GET", "/metrics").text


@pytest.mark.parametrize("linked", ["gpt-0", "gpt-0/commands", "gpt-0/commands/new"])
def test_a_run_behind_a_link_gets_no_command(app, runs, linked):
    """Nothing is written through a link in the place of a run's folder or its inbox."""
    moved = runs.parent / "moved"
    (runs / linked).rename(moved)
    (runs / linked).symlink_to(moved)
    assert _outcome(app, _alert(), _labelled(alertname="TrainWatchdog")) == "unknown_run unknown_run"
    assert [path for path in moved.rglob("*") if path.is_file()] == []


def test_the_watchdog_is_a_heartbeat(app, runs, clock, inbox):
    """Each delivery of the watchdog alert, however old its start, leaves its time in the run's folder."""
    for _ in range(2):
        clock.seconds += 86400
        assert _outcome(app, _labelled(alertname="TrainWatchdog")) == "heartbeat"
    assert RunFolder(runs, "gpt-0").heartbeat() == Heartbeat(received=clock.seconds, count=2)
    assert inbox.waiting() == []
    page = _request(app, "GET", "/metrics").text
    line = next(line for line in page.splitlines() if line.startswith("receiver_last_heartbeat_timestamp_seconds{"))
    assert line.split()[0] == 'receiver_last_heartbeat_timestamp_seconds{run="gpt-0"}'
    assert float(line.split()[1]) == clock.seconds


def test_a_run_that_is_gone_leaves_the_metrics(app, runs):
    """Series of runs do not outlive their folders."""
    _outcome(app, _labelled(alertname="TrainWatchdog"))
    shutil.rmtree(runs / "gpt-0")
    assert 'run="gpt-0"' not in _request(app, "GET", "/metrics").text


def test_the_runs_folders_are_told(app, runs, inbox, clock):
    """What waits in a run's inbox, and its states, are on the page as they are at each scrape."""
    (runs / "gpt-0" / "state.json").write_bytes(msgspec.json.encode({"schema": 1, "policy": {"stopped_step": 7}}))
    assert _outcome(app, _alert()) == "queued"
    (command,) = inbox.waiting()
    written = (inbox.new / f"{command.id}.json").stat().st_mtime
    clock.seconds = written + 100.0
    page = _request(app, "GET", "/metrics").text
    assert 'receiver_commands_waiting{run="gpt-0"} 1.0' in page
    assert 'receiver_command_wait_seconds{run="gpt-0"} 100.0' in page
    assert 'receiver_run_state{run="gpt-0",state="stopped_by_guard"} 1.0' in page
    assert 'receiver_run_state{run="gpt-0",state="budget_spent"} 0.0' in page
    inbox.finish(Record(command=command, outcome="done", decided=0.0, at_step=1))
    page = _request(app, "GET", "/metrics").text
    assert 'receiver_commands_waiting{run="gpt-0"} 0.0' in page
    assert 'receiver_command_wait_seconds{run="gpt-0"} 0.0' in page
    shutil.rmtree(runs / "gpt-0")
    assert 'run="gpt-0"' not in _request(app, "GET", "/metrics").text


def test_a_folder_that_hangs_holds_up_no_scrape_and_no_delivery(runs, inbox):
    """While the runs' folders cannot be read, scrapes show what was seen last, and one thread waits for all of them."""
    (runs / "gpt-0" / "state.json").write_bytes(msgspec.json.encode({"schema": 1, "policy": {}}))
    gate, looks = threading.Event(), []

    def now() -> float:
        looks.append(threading.current_thread().name)
        if looks.count("look") == 2:
            gate.wait(5)
        return STARTED

    app = build_app(runs, now=now, look_seconds=0.05)
    first = _request(app, "GET", "/metrics").text
    assert 'receiver_run_state{run="gpt-0",state="running"} 0.0' in first
    (runs / "gpt-1").mkdir()
    for _ in range(3):
        assert 'receiver_run_state{run="gpt-0",state="running"} 0.0' in _request(app, "GET", "/metrics").text
    assert looks.count("look") == 2
    assert _outcome(app, _alert()) == "queued"
    assert len(inbox.waiting()) == 1
    gate.set()
    wait_for(lambda: 'receiver_commands_waiting{run="gpt-0"} 1.0' in _request(app, "GET", "/metrics").text)


def test_a_folder_of_runs_that_cannot_be_read_is_no_error_of_a_scrape(app, runs):
    """Without the runs' folder the page is served; readiness tells."""
    shutil.rmtree(runs)
    response = _request(app, "GET", "/metrics")
    assert response.status_code == 200
    assert "receiver_run_state{" not in response.text


def test_metrics_are_born_at_zero(app):
    """Every outcome is there before the first delivery, and no `_created` series is."""
    response = _request(app, "GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    for outcome in DELIVERY_OUTCOMES:
        assert f'receiver_deliveries_total{{outcome="{outcome}"}} 0.0' in response.text
    assert "receiver_delivery_seconds_count 0.0" in response.text
    assert "_created" not in response.text


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("1234", 1234),
        (" 1234\n", 1234),
        ("1.234e+03", 1234),
        ("1.234567e+06", 1234567),
        ("1234.5", 1234),
        ("0", 0),
        ("9007199254740992", 2**53),
        ("9007199254740993", None),
        ("", None),
        ("-1", None),
        ("NaN", None),
        ("+Inf", None),
        ("1e999", None),
        ("1_000", None),
        ("٣", None),
        ("0x10", None),
        ("<no value>", None),
        ("1" * 100_000, None),
    ],
)
def test_steps_come_as_templates_render_them(app, inbox, text, step):
    """A number in any of PromQL's spellings is a step; everything else is none."""
    assert step_number(text) == step
    assert _outcome(app, _alert(annotations={"step": text, "steps_total": text})) == "queued"
    assert [(command.step, command.steps_total) for command in inbox.waiting()] == [(step, step)]


@pytest.mark.parametrize("annotations", [{}, None])
def test_a_command_without_annotations_is_a_command(app, inbox, annotations):
    """Step and reason may be missing."""
    assert _outcome(app, _alert(annotations=annotations)) == "queued"
    (command,) = inbox.waiting()
    assert (command.step, command.steps_total, command.reason) == (None, None, "")


def test_a_note_tells_the_job_all_that_the_alert_says(app, inbox):
    """What a job shall only remember comes with its description: which rank, which GPU and which host."""
    words = {"summary": "A GPU is ill.", "description": "rank 0 on GPU-7, GPU 0 of node-1"}
    assert _outcome(app, _labelled(action="note") | {"annotations": words}) == "queued"
    (command,) = inbox.waiting()
    assert command.reason == words["description"]


def test_text_of_a_sender_is_cut_and_cleaned(app, inbox):
    """However long and odd the words are, the command can be read back and shown on a terminal."""
    odd = 'a\x1b[31m\n\r\0\x7f\u202e\u2028"\\é🙂' * 1000
    assert plain(odd, 9) == 'a[31m"\\é🙂'
    alert = _labelled(alertname=odd) | {"annotations": {"summary": odd}}
    assert _outcome(app, alert) == "queued"
    (command,) = inbox.waiting()
    assert command.alert == (plain(odd, 9) * 23)[:200]
    assert command.reason == (plain(odd, 9) * 34)[:300]
    assert (inbox.new / f"{command.id}.json").stat().st_size < MAX_COMMAND_BYTES / 4


def _vanishing(runs: Path, run: str, at_look: int) -> Callable[[], float]:
    """A clock; when it is looked at for the n-th time, the inbox of `run` goes away."""
    looks = iter(range(1, 100))

    def now() -> float:
        if next(looks) == at_look:
            shutil.rmtree(runs / run / "commands" / "new")
        return STARTED

    return now


def test_a_write_that_fails_is_503_and_a_retry_queues_the_rest(runs, inbox):
    """What was queued stays queued, the alerts behind the failure too, and the retry finds them as duplicates."""
    other, third = RunFolder(runs, "gpt-1").inbox, RunFolder(runs, "gpt-2").inbox
    other.create()
    third.create()
    app = build_app(runs, now=_vanishing(runs, "gpt-1", at_look=2))
    body = _message(_alert(), _labelled(run="gpt-1"), _labelled(run="gpt-2"))
    response = _post(app, body)
    assert response.status_code == 503
    assert response.json() == {"error": "could not write to the run's folder: No such file or directory"}
    assert _counts(app) == {"queued": 2, "unavailable": 1}
    other.create()
    assert [answer["outcome"] for answer in _answers(_post(app, body))] == ["duplicate", "queued", "duplicate"]
    assert [len(box.waiting()) for box in (inbox, other, third)] == [1, 1, 1]


def test_a_heartbeat_that_cannot_be_written_is_503(app, runs):
    """A missing heartbeat must not look like a delivered one."""
    (runs / "gpt-0" / "heartbeat.json").mkdir()
    assert _post(app, _message(_labelled(alertname="TrainWatchdog"))).status_code == 503
    assert _counts(app) == {"unavailable": 1}


def test_a_hanging_file_system_holds_up_no_health_check(runs):
    """While one delivery waits in its thread, the event loop answers others."""
    entered, gate, in_time = threading.Event(), threading.Event(), []

    def now() -> float:
        entered.set()
        in_time.append(gate.wait(2))
        return STARTED

    async def talk() -> list[int]:
        transport = httpx.ASGITransport(build_app(runs, now=now))
        async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
            delivery = asyncio.create_task(client.post("/alertmanager", content=_message(_alert())))
            await asyncio.to_thread(entered.wait, 5)
            healthy = await client.get("/-/healthy")
            gate.set()
            return [healthy.status_code, (await delivery).status_code]

    assert asyncio.run(talk()) == [200, 200]
    assert in_time == [True]


def test_a_body_that_does_not_come_is_given_up(runs):
    """A sender that stops in the middle does not hold its place for ever."""

    async def stuck() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    app = build_app(runs, body_seconds=0.01)
    assert _post(app, stuck()).status_code == 408
    assert _counts(app) == {"bad_request": 1}


def test_a_sender_that_hangs_up_is_no_error_of_ours(app):
    """A broken connection in the middle of a body is counted, and raises nothing."""
    sent = []

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/alertmanager", "headers": [], "query_string": b""}
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 400
    assert _counts(app) == {"bad_request": 1}


def test_a_mistake_of_ours_shows_no_traceback(runs):
    """What nobody foresaw is a plain 500."""

    def broken() -> float:
        raise ZeroDivisionError("secret path /home/me")

    response = _post(build_app(runs, now=broken), _message(_alert()), crash=False)
    assert response.status_code == 500
    assert response.json() == {"error": "internal error, see the receiver's log"}


def test_health_and_readiness(app, runs):
    """Healthy as long as it answers; ready as long as it can read the runs' folder."""
    assert _request(app, "GET", "/-/healthy").status_code == 200
    assert _request(app, "GET", "/-/ready").status_code == 200
    shutil.rmtree(runs)
    assert _request(app, "GET", "/-/healthy").status_code == 200
    response = _request(app, "GET", "/-/ready")
    assert (response.status_code, response.text) == (503, "not ready: runs folder: No such file or directory\n")


def test_other_paths_and_methods_do_nothing(app):
    """There is one way in."""
    assert _request(app, "GET", "/alertmanager").status_code == 405
    assert _request(app, "POST", "/-/ready").status_code == 405
    assert _request(app, "POST", "/").status_code == 404


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer s3cre", "Bearer s3cretx", "Basic s3cret", "s3cret"],
)
def test_without_the_token_nothing_is_read(runs, inbox, clock, header):
    """A missing or wrong token is 401 before the body, and before any other fault is looked at."""

    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    app = build_app(runs, now=clock, credentials=Credentials(token=TOKEN))
    headers = {} if header is None else {"Authorization": header}
    for body in (_message(_alert()), unread()):
        response = _post(app, body, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    assert inbox.waiting() == []
    assert _counts(app) == {"unauthorized": 2}


@pytest.mark.parametrize("header", ["Origin", "Sec-Fetch-Site"])
def test_a_page_in_a_browser_commands_nothing(app, inbox, header):
    """A web page that posts to this host's loopback is a forger: browsers give themselves away, and get a 403."""
    assert _post(app, _message(_alert()), headers={header: "null"}).status_code == 403
    assert inbox.waiting() == []
    assert _counts(app) == {"forbidden": 1}


def test_odd_bytes_are_no_token(runs):
    """A header that is not ASCII is wrong, not an error."""
    app = build_app(runs, credentials=Credentials(token=TOKEN))
    assert _post(app, b"", headers=[(b"Authorization", b"Bearer s3cr\xe9t\xff")]).status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_with_the_token_alerts_are_taken(runs, clock, scheme):
    """The scheme's case does not matter, and health and metrics ask for nothing."""
    app = build_app(runs, now=clock, credentials=Credentials(token=TOKEN))
    assert _post(app, _message(_alert()), headers={"Authorization": f"{scheme} s3cret"}).status_code == 200
    assert _request(app, "GET", "/-/ready").status_code == 200
    assert _counts(app) == {"queued": 1}


def test_every_command_queued_or_refused_is_one_log_line(app, caplog):
    """The log says what became of which alert, and hostile text cannot forge a line."""
    caplog.set_level("INFO")
    _outcome(app, _alert(), _labelled(run="x\n2026 INFO forged", alertname="a" * 10_000))
    lines = [record.getMessage() for record in caplog.records if record.name == "exporter.intake"]
    assert lines[0] == "alert 'TrainLossSpikeSustained' of run 'gpt-0': queued"
    assert "'x\\n2026 INFO forged': unknown_run" in lines[1]
    assert all("\n" not in line and len(line) < 500 for line in lines)


@pytest.mark.parametrize("valid", [False, True], ids=["odd", "valid"])
def test_no_body_does_harm(runs, inbox, valid):
    """Whatever is sent, the answer is 200 or 400, and the inbox holds what was rightly queued and nothing else.

    What the schema of the payload allows is 200. `make soak` sends ten thousand.
    """
    send_bodies(runs, inbox, VALID if valid else BODIES, examples=200, valid=valid)
