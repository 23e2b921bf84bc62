"""Commands pulled over HTTP: what a job is told, what it may tell, and that each command is taken once."""

import asyncio
import time

import httpx
import msgspec
import pytest
from receivers import alert, delivery, running
from waiting import wait_for

from exporter.access import Credentials
from exporter.commands import Command, Record
from exporter.pull import MOST_COMMANDS, Report, Waiting
from exporter.run_status import read_runs
from exporter.runs import RunFolder
from exporter.webhook import build_app
from trainer_plugin.config import PullConfig, read_config
from trainer_plugin.pull import REPORT_SECONDS, Puller, PullError
from trainer_plugin.run_folder import JobFolder

TOKEN = {"Authorization": "Bearer s3cret"}
NOW = 1e9


def ask(app, method, run, body=b"", headers=TOKEN):
    """The answer to a request for a run's commands."""

    async def send():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://receiver") as client:
            return await client.request(method, "/commands", params={"run": run}, content=body, headers=headers)

    return asyncio.run(send())


def command(number, run="far", **changes):
    """A command that waits."""
    fields = {"id": f"c{number}", "run": run, "action": "note", "source": "operator", "received": NOW + number}
    return Command(**{**fields, **changes})


def report(*records, **states):
    """The body of a job's report."""
    return msgspec.json.encode(Report(records=list(records), states=states))


@pytest.fixture
def runs(tmp_path):
    """The receiver's folder of runs, with one run of a job of its own."""
    RunFolder(tmp_path / "runs", "near").inbox.create()
    return tmp_path / "runs"


@pytest.fixture
def app(runs):
    """A receiver that lets jobs pull."""
    return build_app(runs, now=lambda: NOW, credentials=Credentials(token=b"s3cret"), pull=True)


def test_a_first_report_makes_the_run_and_its_commands_are_told(app, runs):
    """Before it has reported a run is unknown; then its commands are told, oldest first, with the heartbeat."""
    assert ask(app, "GET", "far").status_code == 404
    assert ask(app, "POST", "far", report(running=True)).status_code == 200
    folder = RunFolder(runs, "far")
    folder.beat(NOW)
    for number in (2, 1):
        assert folder.inbox.put(command(number))
    told = msgspec.json.decode(ask(app, "GET", "far").content, type=Waiting)
    assert [each.id for each in told.commands] == ["c1", "c2"]
    assert (told.heartbeat.received, told.heartbeat.count) == (NOW, 1)
    assert sorted(path.name for path in runs.iterdir()) == ["far", "near"]


def test_what_came_of_a_command_is_kept_and_it_is_told_no_more(app, runs):
    """A record ends its command, twice as well as once; one of a command that was never asked is not taken."""
    ask(app, "POST", "far", report())
    inbox = RunFolder(runs, "far").inbox
    inbox.put(command(1))
    inbox.put(command(2))
    records = [
        Record(command=each, outcome="done", decided=NOW, at_step=7, detail="noted")
        for each in (command(1), command(3), command(2, run="near"))
    ]
    for _ in range(2):
        told = msgspec.json.decode(ask(app, "POST", "far", report(*records)).content, type=Waiting)
        assert [each.id for each in told.commands] == ["c2"]
    assert [(each.command.id, each.outcome, each.at_step) for each in inbox.records()] == [("c1", "done", 7)]


def test_a_flood_comes_in_parts(app, runs):
    """One answer holds the oldest commands only; the rest come when these are decided."""
    ask(app, "POST", "far", report())
    inbox = RunFolder(runs, "far").inbox
    for number in range(MOST_COMMANDS + 5):
        inbox.put(command(number))
    told = msgspec.json.decode(ask(app, "GET", "far").content, type=Waiting)
    assert [each.id for each in told.commands] == [f"c{number}" for number in range(MOST_COMMANDS)]


def test_a_folder_that_a_job_made_here_is_left_alone(app, runs):
    """A run that shares its folder is neither told nor written to for another job: 409 says what to do."""
    before = sorted(runs.rglob("*"))
    for method in ("GET", "POST"):
        answer = ask(app, method, "near", report(running=True) if method == "POST" else b"")
        assert (answer.status_code, "leave `pull` out" in answer.text) == (409, True)
    assert sorted(runs.rglob("*")) == before


@pytest.mark.parametrize("run", ["../x", "..", ".", "", "/etc", "a/b", "a\0", "a" * 10_000, "lauf-ü", "targets", "x\n"])
def test_a_hostile_name_makes_no_folder(app, runs, run):
    """Whatever a job calls itself, nothing is made but a plain folder among the runs."""
    before = sorted(runs.parent.rglob("*"))
    assert ask(app, "POST", run, report()).status_code == 404
    assert ask(app, "GET", run).status_code == 404
    assert sorted(runs.parent.rglob("*")) == before


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"records": 1}', b'{"records": [{}]}', b'{"states": {"running": 2}}', b'{"schema": 2}']
)
def test_what_is_no_report_is_400(app, runs, body):
    """A body that no job of this version writes changes nothing."""
    assert ask(app, "POST", "far", body).status_code == 400
    assert not (runs / "far").exists()


def test_states_that_nobody_knows_are_left_out(app, runs):
    """A report cannot make up series, however many words it has."""
    ask(app, "POST", "far", report(running=True, budget_spent=True, **{f"x{n}": True for n in range(5000)}))
    (status,) = read_runs(runs, NOW)
    assert (status.run, status.states) == ("far", {"running": True, "budget_spent": True})
    (status,) = read_runs(runs, NOW + 60.0)
    assert status.states == {"running": False, "budget_spent": True}


def test_strangers_are_told_nothing(runs):
    """Without the token 401; at a receiver that asks for none nobody can pull at all; a browser gets 403."""
    guarded = build_app(runs, credentials=Credentials(token=b"s3cret"), pull=True)
    for method in ("GET", "POST"):
        assert ask(guarded, method, "far", headers={}).status_code == 401
        assert ask(guarded, method, "far", headers={**TOKEN, "Origin": "http://x"}).status_code == 403
        assert ask(build_app(runs), method, "far", headers={}).status_code == 403
    assert sorted(path.name for path in runs.iterdir()) == ["near"]


# --- The job's side -------------------------------------------------------------------------------------------------


@pytest.fixture
def receiver(tmp_path):
    """A real receiver with a token: its folder of runs, and the job's options for it."""
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "there").mkdir()
    config = tmp_path / "exporter.yaml"
    config.write_text(f"runs: {tmp_path}/there\nreceiver: {{bearer_token_file: {tmp_path}/token}}\n")
    with running("--config", config, "--listen", "127.0.0.1:0") as (process, url):
        yield process, url, {"url": url, "bearer_token_file": str(tmp_path / "token")}


def post(url, *alerts):
    """The outcomes of a delivery."""
    answer = httpx.post(f"{url}/alertmanager", content=delivery(*alerts), headers=TOKEN)
    return [each["outcome"] for each in answer.json()["alerts"]]


class Clock:
    """Seconds that pass when told to."""

    seconds = 0.0

    def __call__(self):
        """The time."""
        return self.seconds


@pytest.fixture
def clock():
    """A clock that stands still."""
    return Clock()


@pytest.fixture
def folder(tmp_path):
    """The job's own folder of the run `far`, which the receiver does not see."""
    folder = JobFolder(tmp_path / "here", "far")
    yield folder
    folder.lock.release()


def puller(folder, options, clock):
    """The job's puller, asked round by round."""
    return Puller(PullConfig(**options), folder, "far", on_error=lambda _: None, clock=clock)


def test_a_command_is_pulled_once_and_its_outcome_told(tmp_path, receiver, folder, clock):
    """From the delivery to the job's inbox, to the record at the receiver; a new puller brings nothing twice."""
    _, url, options = receiver
    there = RunFolder(tmp_path / "there", "far").inbox
    assert post(url, alert(1, run="far")) == ["unknown_run"]
    first = puller(folder, options, clock)
    first.poll()
    assert post(url, alert(1, run="far"), alert(2, run="far")) == ["queued", "queued"]
    first.poll()
    first.poll()
    waiting = folder.inbox.waiting()
    assert [each.reason for each in waiting] == ["alert 1", "alert 2"]
    folder.inbox.finish(Record(command=waiting[0], outcome="done", decided=NOW, at_step=3))
    # The job dies here, before it could tell.
    second = puller(folder, options, clock)
    second.poll()
    assert [(each.command, each.outcome) for each in there.records()] == [(waiting[0], "done")]
    assert folder.inbox.waiting() == there.waiting() == waiting[1:]


def test_a_heartbeat_is_one_only_when_it_is_new(receiver, folder, clock):
    """What the receiver heard before the job asked is no sign of life; each later one is one."""
    _, url, options = receiver
    watchdog = alert(1, run="far")
    watchdog["labels"]["alertname"] = "TrainWatchdog"
    asking = puller(folder, options, clock)
    asking.poll()
    assert post(url, watchdog) == ["heartbeat"]
    asking = puller(folder, options, clock)
    asking.poll()
    assert folder.outer.heartbeat() is None
    for count in (1, 2):
        assert post(url, watchdog) == ["heartbeat"]
        asking.poll()
        asking.poll()
        assert folder.outer.heartbeat().count == count


def test_the_jobs_states_are_told_every_few_seconds_and_at_the_end(tmp_path, receiver, folder, clock):
    """The receiver's page shows a far run like a near one; a job that ends in order is not shown as running."""
    _, _, options = receiver
    asking = puller(folder, options, clock)
    asking.poll()
    (status,) = read_runs(tmp_path / "there", time.time())
    assert status.states == {"running": True}
    folder.save_state(b'{"schema": 1, "policy": {"stopped_step": 5}}')
    asking.poll()
    assert "stopped_by_guard" not in (tmp_path / "there/far/reported.json").read_text()
    clock.seconds += REPORT_SECONDS
    asking.poll()
    assert '"stopped_by_guard":true' in (tmp_path / "there/far/reported.json").read_text()
    asking.poll(running=False)
    assert '"running":false' in (tmp_path / "there/far/reported.json").read_text()


def test_a_receiver_that_is_gone_or_says_no_is_an_error_held_back(receiver, folder, clock, tmp_path):
    """A wrong token, no receiver and something else at its place are told, and the next round asks again."""
    process, url, options = receiver
    asking = puller(folder, options, clock)
    (tmp_path / "token").write_text("wrong")
    with pytest.raises(PullError, match="401"):
        asking.poll()
    (tmp_path / "token").write_text("s3cret")
    asking.poll()
    with pytest.raises(PullError, match="404"):
        puller(folder, {**options, "url": f"{url}/elsewhere"}, clock).poll()
    process.terminate()
    process.wait()
    with pytest.raises(PullError, match="refused"):
        asking.poll()


def test_a_guard_obeys_what_it_pulls(receiver, make_guard):
    """A job without a shared folder lowers its rate when the alert asks, and the receiver keeps the outcome."""
    _, url, options = receiver
    # However many steps it makes until it is asked, it has nothing to say of its own.
    job = make_guard(pull=options, run="far", detection={"warmup_steps": 1_000_000})

    def rate_lowered():
        job.step()
        return job.guard._parts.learning_rate.factor < 1.0

    def waiting():
        return httpx.get(f"{url}/commands", params={"run": "far"}, headers=TOKEN).json()["commands"]

    wait_for(lambda: post(url, alert(1, run="far")) != ["unknown_run"])
    wait_for(rate_lowered)
    wait_for(lambda: waiting() == [], meanwhile=job.step)
    assert post(url, alert(1, run="far", starts_at="2020-01-01T00:00:00Z")) == ["stale"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "receiver:9402", "bearer_token_file": "t"}, "`url` must be http"),
        ({"url": "file:///etc/passwd", "bearer_token_file": "t"}, "`url` must be http"),
        ({"url": "http://a@b/", "bearer_token_file": "t"}, "`url` must be http"),
        ({"url": "https://receiver:9402"}, "`url` needs `bearer_token_file` or `cert_file`"),
        ({"url": "https://receiver:9402", "cert_file": "c"}, "`cert_file` and `key_file` are wanted together"),
    ],
)
def test_options_that_cannot_work_are_refused(options, message):
    """What is wrong with `pull` in guard.yaml is told at the start."""
    with pytest.raises(ValueError, match=message):
        read_config({"pull": options})


@pytest.mark.parametrize("field", ["bearer_token_file", "ca_file"])
def test_files_that_are_not_there_are_refused(folder, clock, field, tmp_path):
    """A secret or a CA that is missing stops the job before its first step."""
    (tmp_path / "token").write_text("s3cret")
    options = {"url": "https://127.0.0.1:1", "bearer_token_file": str(tmp_path / "token"), field: "/none"}
    with pytest.raises(ValueError, match=r"pull.*/none"):
        puller(folder, options, clock)
