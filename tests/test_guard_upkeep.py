"""The Guard's own affairs: ending, ports, disks and loggers that fail, and never in the training's way."""

import math
import shutil
import socket
import time
import urllib.request

import pytest
import torch
from training import equal, hooks, spoil_weights
from waiting import wait_for

from exporter.catalog import CATALOG
from exporter.commands import Command


def scrape(port: int) -> str:
    """The page as Prometheus gets it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        return answer.read().decode()


def errors(job) -> float:
    """Errors of the guard that were held back."""
    return job.guard.page.value("train_guard_errors_total")


def test_a_logger_that_fails_is_counted_and_heals_nothing_less(make_guard):
    """With `on_signals` raising in every step, the run is still watched, saved, shown and rolled back."""

    def fail(_signals):
        raise RuntimeError("the logger is offline")

    job = make_guard(on_signals=fail)
    job.run(25)
    assert errors(job) == 25
    assert job.guard.page.value("train_step") == 25
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 20


def test_each_error_is_logged_once(make_guard, caplog):
    """The same error in every step is one line in the log."""

    def fail(_signals):
        raise RuntimeError("the logger is offline")

    make_guard(on_signals=fail).run(5)
    assert sum("the logger is offline" in record.getMessage() for record in caplog.records) == 1


def test_signals_are_handed_to_other_loggers(make_guard):
    """`on_signals` gets each step's signals, in order."""
    seen = []
    make_guard(on_signals=seen.append).run(3)
    assert [signals.step for signals in seen] == [1, 2, 3]
    assert all(signals.grad_norm > 0 for signals in seen)


def test_a_full_disk_stops_nothing(make_guard, tmp_path):
    """With a file where the run folder was, steps go on, errors are counted, and a rollback still works."""
    job = make_guard()
    job.run(20)
    good = job.weights()
    job.run(25)
    job.guard._parts.loop.flush(5.0)
    (tmp_path / "runs" / "tiny").rename(tmp_path / "away")
    (tmp_path / "runs" / "tiny").touch()
    spoil_weights(job.model)
    job.step()
    assert errors(job) >= 1  # Counted while the boundary waited for the disk: the page was not held meanwhile.
    assert job.guard.step == 20
    assert equal(job.weights(), good)
    job.run(24)
    (tmp_path / "runs" / "tiny").unlink()
    (tmp_path / "away").rename(tmp_path / "runs" / "tiny")


def test_a_checkpoint_tier_that_fails_is_counted(make_guard, tmp_path):
    """A tier with a file in its place costs its copies, counted by tier, and no step."""
    job = make_guard()
    shutil.rmtree(tmp_path / "shared" / "tiny")
    (tmp_path / "shared" / "tiny").touch()
    job.run(25)
    assert job.guard.page.value("train_checkpoint_failures_total", "shared") == 2
    assert job.guard.page.value("train_checkpoint_failures_total", "local") == 0
    assert job.guard.page.value("train_checkpoint_step", "local", "periodic") == 20
    assert job.guard.page.value("train_checkpoint_step", "shared", "periodic") == -1
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 20


def test_a_step_that_cannot_be_measured_keeps_the_recipes_clip(make_guard):
    """When the guard cannot read a loss, it clips as the recipe would have, and counts."""
    job = make_guard(actions={"clip_max_norm": 0.5})
    job.model(torch.full((1, 4), 100.0)).square().sum().backward()
    job.guard.before_optimizer("no loss at all")
    norm = torch.cat([parameter.grad.flatten() for parameter in job.model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.5, rel=1e-4)
    assert errors(job) == 1
    job.guard.end_step()


def test_close_leaves_nothing_behind_and_may_come_twice(make_guard, tmp_path):
    """Closed, the hooks, the port, the target and the lock are gone; a second close changes nothing."""
    job = make_guard()
    job.run(3)
    port = job.guard.metrics_port
    target = tmp_path / "runs" / "targets" / "tiny-0.json"
    assert target.exists()
    assert hooks(job.optimizer) == 4
    job.guard.close()
    job.guard.close()
    assert hooks(job.optimizer) == 0
    assert not target.exists()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))
    assert (tmp_path / "runs" / "tiny" / "lock").read_bytes() == b""


def test_p20_a_run_may_be_built_again_in_one_process(make_guard):
    """Closed and built again, and built again without a close, a run has one set of series, from the new guard."""
    first = make_guard()
    first.run(12)
    first.guard.close()
    second = make_guard()
    second.run(14)
    third = make_guard()  # The second is closed by this.
    assert hooks(second.optimizer) == 0
    third.run(13)
    page = scrape(third.guard.metrics_port)
    lines = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    assert 'train_step{run="tiny",rank="0"} 13.0\n' in page
    assert 'train_steps_total{run="tiny",rank="0"} 19.0\n' in page


def test_p20_no_gauge_shares_its_name_with_a_counter():
    """A gauge X beside a counter X_total is one name to some readers: there is none."""
    names = {metric.name for metric in CATALOG}
    assert not [m.name for m in CATALOG if m.kind == "counter" and m.name.removesuffix("_total") in names - {m.name}]


def test_p21_a_taken_port_costs_no_training(make_guard, caplog):
    """With its port occupied the job trains, serves on another one, and one warning says which was not to be had."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        job = make_guard(metrics={"port": taken.getsockname()[1]})
        job.run(2)
        assert job.guard.metrics_port not in {None, taken.getsockname()[1]}
        assert 'train_step{run="tiny",rank="0"} 2.0\n' in scrape(job.guard.metrics_port)
    assert sum("cannot be had" in record.getMessage() for record in caplog.records) == 1
    port = job.guard.metrics_port
    job.guard.close()
    again = make_guard(metrics={"port": port})
    assert again.guard.metrics_port == port


def test_p21_no_port_at_all_is_shown_and_costs_no_training(make_guard, caplog):
    """On a host that cannot be bound to, the job runs without an endpoint and says so."""
    job = make_guard(metrics={"host": "192.0.2.1"})
    job.run(2)
    assert job.guard.metrics_port is None
    assert "no endpoint" in caplog.text


def test_the_alert_has_its_grace_while_the_outer_loop_is_up(make_guard, clock):
    """With heartbeats arriving the job's own slow verdict waits 30 s for a command; without them it acts at once."""
    job = make_guard(clock=clock, local_only=False)
    job.run(30)
    job.guard._parts.folder.outer.beat(1.0)
    wait_for(lambda: job.guard._parts.loop.up)

    def no_update(model):
        model[0].weight.grad[0, 0] = math.nan

    for _ in range(20):
        job.step(no_update)
    assert job.guard.page.value("train_control_loop_up") == 1.0
    assert job.guard.page.value("train_actions_total", "rollback", "local", "done") == 0
    clock.now += 31.0
    job.step(no_update)
    assert job.guard.page.value("train_actions_total", "rollback", "local", "done") == 1


def test_an_alerts_command_makes_the_job_wait_no_longer(make_guard, clock):
    """A rollback that the alert asks for is done at the next boundary, under the alert's name, and once."""
    job = make_guard(clock=clock, local_only=False)
    job.run(25)
    command = Command(
        id="a1", run="tiny", action="rollback", source="alert", received=1.0, alert="Own", step=25, steps_total=25
    )
    inbox = job.guard._parts.folder.inbox
    for name in ("a1", "a2"):
        inbox.put(Command(**{key: getattr(command, key) for key in command.__struct_fields__} | {"id": name}))
    wait_for(lambda: len(job.guard._parts.loop.commands()) == 2)
    job.step()
    job.step()
    job.guard._parts.loop.flush(5.0)
    assert {record.command.id: record.outcome for record in inbox.records()} == {"a1": "done", "a2": "duplicate"}


def test_data_that_cannot_be_named_keep_no_run_from_going_back(make_guard):
    """Where the loader fails to tell its samples, what is bad goes back all the same, and nothing is left out."""
    job = make_guard()
    job.run(25)

    def fail(*_, **__):
        raise KeyError("sample 17")

    job.guard._parts.data._source.sample_ids = fail
    spoil_weights(job.model)
    job.step()
    assert job.guard.step == 20
    assert job.guard._parts.data.quarantine == []


def test_an_action_that_fails_in_its_own_way_has_an_outcome(make_guard):
    """An error that nobody foresaw is a failed action with a record, and not the same wish in every step."""
    job = make_guard(detection={"warmup_steps": 1_000_000})
    job.run(5)
    folder, loop = job.guard._parts.folder, job.guard._parts.loop

    def fail():
        raise KeyError("no such worker")

    job.data.state_dict = fail
    folder.inbox.put(Command(id="a1", run="tiny", action="checkpoint", source="operator", received=time.time()))
    wait_for(loop.commands)
    before = errors(job)
    for _ in range(2):
        job.step()
    loop.flush(5.0)
    record = folder.inbox.record("a1")
    assert (record.outcome, record.detail) == ("failed", "KeyError: 'no such worker'")
    assert errors(job) == before


def test_a_policy_that_fails_keeps_no_run_from_being_saved(make_guard):
    """Checkpoints are written, a lowered rate finds its way back, and a signal ends the run all the same."""
    job = make_guard()
    job.run(5)
    parts = job.guard._parts

    def fail(*_):
        raise ValueError("nothing can be decided")

    parts.policy.decide = fail
    parts.learning_rate.lower(0.5, floor=0.1, now=5, hold_steps=3, return_steps=0, stack=True)
    job.run(12)
    assert parts.checkpoints.newest_step("shared") == 10
    assert parts.learning_rate.factor == 1.0
    parts.stop_signals.asked = "SIGTERM"
    job.step()
    assert job.guard.stopping
