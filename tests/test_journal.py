"""The journal: what happened is on the page, in the trail, and with whoever asked."""

import msgspec
import pytest

from exporter.commands import Command
from exporter.page import Page
from trainer_plugin.checkpoints.manifest import Manifest
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.store import Loaded
from trainer_plugin.control_loop import ControlLoop
from trainer_plugin.effects import EFFECT_STEPS
from trainer_plugin.journal import Journal
from trainer_plugin.policy.decisions import Decision, Moment, Refusal
from trainer_plugin.policy.incidents import Incident, Remedy
from trainer_plugin.run_folder import JobFolder

MOMENT = Moment(step=40, steps_total=45, now=12.0, loop_up=True)
COMMAND = Command(id="a1", run="tiny", action="rollback", source="alert", received=1.0, alert="TrainLossNotRecovering")


def incident(**options) -> Incident:
    """An incident at step 36."""
    return Incident(id=3, first_step=36, detected_step=37, last_step=37, evidence=["loss is up"], **options)


class Desk:
    """A journal with its page and folder; the loop has no thread, `trail` turns it."""

    def __init__(self, folder) -> None:
        self.folder = JobFolder(folder / "runs", "tiny")
        self.page = Page(run="tiny")
        self.errors: list[Exception] = []
        self.loop = ControlLoop(self.folder, on_error=self.errors.append)
        self.journal = Journal(self.page, self.loop, self.folder)

    def trail(self) -> list[dict]:
        """The lines of the trail, once all is written."""
        self.loop.poll()
        assert self.errors == []
        lines = (self.folder.path / "incidents.jsonl").read_bytes().splitlines()
        return [msgspec.json.decode(line) for line in lines]


@pytest.fixture
def desk(tmp_path):
    """A journal at work."""
    desk = Desk(tmp_path)
    yield desk
    desk.folder.lock.release()


def test_an_incident_is_counted_when_it_opens_and_told_when_it_heals(desk):
    """An incident counts once, under its class, and has two lines in the trail."""
    desk.journal.incident(incident(class_="numerical"), 37)
    desk.journal.incident(incident(class_="numerical", healed=True, healed_step=60), 60)
    assert desk.page.value("train_incidents_total", "numerical") == 1.0
    opened, healed = desk.trail()
    assert (opened["kind"], opened["class"], opened["evidence"]) == ("incident_opened", "numerical", ["loss is up"])
    assert (healed["kind"], healed["healed_step"]) == ("incident_healed", 60)


def test_a_class_that_changes_is_told_with_its_reason(desk, caplog):
    """Another class of the open incident is a line in log and trail, once; that of another incident is none."""
    for step, class_ in enumerate(["unknown", "unknown", "bad_sample", "bad_sample"]):
        desk.journal.follow(incident(class_=class_), step)
    desk.journal.follow(None, 4)
    desk.journal.follow(incident(class_="numerical"), 5)
    (told,) = desk.trail()
    assert (told["kind"], told["step"], told["class"]) == ("incident_class", 2, "bad_sample")
    assert "is called bad_sample now: loss is up" in caplog.text


def test_parameters_with_a_bad_gradient_are_named(desk, caplog):
    """The log names the first ten, the trail a hundred."""
    names = [f"layer.{number}" for number in range(150)]
    desk.journal.nonfinite(7, gradients=names, weights=[], withheld=True)
    assert "layer.9" in caplog.text
    assert "and 140 more: the update is withheld" in caplog.text
    assert "layer.10" not in caplog.text
    (line,) = desk.trail()
    assert (line["kind"], line["step"], line["parameters"]) == ("nonfinite", 7, names[:100])


def test_an_action_is_told_with_its_reason_and_target(desk):
    """A rollback's line says why, on whose word, what came of it, to which step, and how the tiers stand."""
    decision = Decision(action="rollback", source="alert", reason="so", incident=incident(), command=COMMAND)
    remedy = Remedy(
        action="rollback", step=40, steps_total=45, source="alert", outcome="done", alert=COMMAND.alert, command="a1"
    )  # fmt: skip
    target = Manifest(
        run="tiny", step=30, branch=0, kind="periodic", finite=True, created=1.0, files={}, torch="2.13"
    )  # fmt: skip
    loaded = Loaded(manifest=target, snapshot=Snapshot(tensors={}), tier="shared", degraded=("local",))
    desk.journal.action(decision, remedy, loaded)
    assert desk.page.value("train_actions_total", "rollback", "alert", "done") == 1.0
    (line,) = desk.trail()
    wanted = {
        "kind": "action",
        "incident": 3,
        "reason": "so",
        "alert": "TrainLossNotRecovering",
        "command": "a1",
        "outcome": "done",
        "to_step": 30,
        "tier": "shared",
        "tiers": {"local": "damaged", "shared": "whole"},
    }
    assert wanted.items() <= line.items()


def test_a_refusal_is_counted_and_told(desk):
    """A command that led to nothing is counted under its outcome, and the trail says why."""
    refusal = Refusal(action="rollback", source="alert", outcome="stale", detail="over", command=COMMAND)
    desk.journal.refusal(refusal, MOMENT)
    assert desk.page.value("train_actions_total", "rollback", "alert", "stale") == 1.0
    (line,) = desk.trail()
    assert line["kind"] == "refused"
    assert (line["step"], line["steps_total"], line["outcome"], line["detail"]) == (40, 45, "stale", "over")


@pytest.mark.parametrize("outcome", ["done", "refused_budget"])
def test_the_trail_says_who_asked_and_why(desk, outcome):
    """An operator's name and words are in the trail, whatever came of the command."""
    command = Command(
        id="o1", run="tiny", action="lower_lr", source="operator", received=1.0, reason="too noisy", by="kim@login1"
    )  # fmt: skip
    if outcome == "done":
        decision = Decision(
            action="lower_lr", source="operator", reason="too noisy", incident=incident(), command=command
        )  # fmt: skip
        remedy = Remedy(action="lower_lr", step=40, steps_total=45, source="operator", outcome="done", command="o1")
        desk.journal.action(decision, remedy, None)
    else:
        refusal = Refusal(action="lower_lr", source="operator", outcome=outcome, detail="spent", command=command)
        desk.journal.refusal(refusal, MOMENT)
    (line,) = desk.trail()
    assert (line["by"], line["asked"], line["command"]) == ("kim@login1", "too noisy", "o1")


def test_the_outer_loops_silence_and_return_are_told_once(desk, caplog):
    """Until the first sign of life nothing is said; then each change is, in the log and in the trail (R23)."""
    for step, up in enumerate([False, True, True, False, False, True]):
        desk.journal.outer_loop(up=up, step=step)
    assert [(line["step"], line["up"]) for line in desk.trail()] == [(1, True), (3, False), (5, True)]
    assert "step 3: the outer loop is silent: the job decides alone" in caplog.text


def test_the_trail_says_what_an_action_did_to_the_loss(desk):
    """The level before a rollback and after it is one more line, once enough steps were run; a note has none."""
    for loss in [7.0] * 30:
        desk.journal.loss(loss)
    for action in ("rollback", "note"):
        decision = Decision(action=action, source="local", reason="so", incident=incident())
        remedy = Remedy(action=action, step=40, steps_total=45, source="local", outcome="done")
        desk.journal.action(decision, remedy, None)
    for loss in [2.0] * EFFECT_STEPS:
        desk.journal.loss(loss)
    *_, line = desk.trail()
    assert [each["kind"] for each in desk.trail()] == ["action", "action", "effect"]
    wanted = {"action": "rollback", "step": 40, "incident": 3, "loss_before": 7.0, "loss_after": 2.0}
    assert wanted.items() <= line.items()


def test_whoever_asked_gets_an_answer(desk):
    """A command's record says what came of it and when; a wish of the job's own needs none."""
    desk.folder.inbox.put(COMMAND)
    desk.journal.answer(None, "done", "", MOMENT)
    desk.journal.answer(COMMAND, "refused_budget", "spent", MOMENT)
    desk.loop.poll()
    (record,) = desk.folder.inbox.records()
    assert (record.command, record.outcome, record.detail) == (COMMAND, "refused_budget", "spent")
    assert (record.decided, record.at_step) == (12.0, 40)
