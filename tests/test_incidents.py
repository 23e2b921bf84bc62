"""Incidents: what they take in, and which class their signs give them."""

import math

import msgspec
import pytest

from trainer_plugin.detection.detectors import Verdict
from trainer_plugin.policy.incidents import MAX_EVIDENCE, Incident, Remedy, classify


def verdict(step, detector="robust", signal="loss", *, value=6.0, baseline=2.0, first_step=None):
    """A verdict about a step."""
    first_step = step if first_step is None else first_step
    return Verdict(
        detector=detector, signal=signal, step=step, value=value, baseline=baseline, first_step=first_step
    )  # fmt: skip


@pytest.fixture
def incident():
    """An incident just opened at step 10."""
    return Incident(id=1, first_step=10, detected_step=10, last_step=10)


def test_an_incident_spans_its_verdicts(incident):
    """The first step is the earliest onset of any verdict, the last step the latest verdict."""
    incident.add(verdict(10), 1.0)
    incident.add(verdict(12, signal="grad_norm", first_step=8), 1.0)
    incident.add(verdict(11), 1.0)
    assert (incident.first_step, incident.detected_step, incident.last_step) == (8, 10, 12)


def test_a_target_lies_before_the_update_that_the_first_bad_loss_shows(incident):
    """The loss of a step shows the weights that the step before it has made."""
    assert incident.before_step == 9


def test_evidence_names_each_sign_once(incident):
    """Every pair of detector and signal is told once, with its step, its value and what it was held against."""
    for step in range(10, 20):
        incident.add(verdict(step), 1.0)
    incident.add(verdict(20, "nonfinite", "grad_norm", value=math.inf, baseline=math.nan), math.nan)
    assert incident.evidence == [
        "step 10: robust on loss, 6 against 2",
        "step 20: nonfinite on grad_norm, inf",
    ]


def test_evidence_is_bounded(incident):
    """However many signs there are, the evidence stays short."""
    for number in range(3 * MAX_EVIDENCE):
        incident.add(verdict(10 + number, f"detector{number}"), 1.0)
    assert len(incident.evidence) == MAX_EVIDENCE
    assert incident.last_step == 10 + 3 * MAX_EVIDENCE - 1


@pytest.mark.parametrize(
    ("signs", "ratio", "expected"),
    [
        ({"robust:loss": 5}, 1.1, "bad_sample"),  # R3: the loss jumps over a calm gradient.
        ({"robust:loss": 5}, 1.5, "unknown"),
        ({"robust:loss": 5}, None, "unknown"),
        ({"robust:loss": 5, "robust:grad_norm": 4}, 1.1, "gradient_explosion"),  # The gradient first.
        ({"robust:loss": 5, "robust:grad_norm": 5}, 9.0, "unknown"),  # Both at once: so does a batch.
        ({"robust:loss": 5, "ema_ratio:grad_norm": 5}, 19.0, "unknown"),
        ({"robust:loss": 5, "robust:grad_norm": 6}, 9.0, "unknown"),
        ({"robust:loss": 5, "robust:grad_norm": 6}, 1.0, "bad_sample"),
        ({"robust:grad_norm": 5}, None, "gradient_explosion"),
        ({"ema_ratio:grad_norm": 9, "robust:loss": 5}, 2.0, "gradient_explosion"),
        ({"ema_ratio:grad_norm": 9, "robust:loss": 5}, 1.0, "bad_sample"),  # Until it turns out to last.
        ({"nonfinite:loss": 9, "ema_ratio:grad_norm": 5}, 1.0, "numerical"),
        ({"nonfinite:grad_norm": 9, "robust:loss": 5}, 1.0, "numerical"),
        ({"drift:amp_loss_scale": 9, "ema_ratio:grad_norm": 5}, 1.0, "numerical"),
        ({"drift:loss": 5}, None, "lr_too_high"),
        ({"oscillation:loss": 5}, None, "lr_too_high"),
        ({"robust:loss": 5, "oscillation:loss": 5}, 1.0, "lr_too_high"),  # No batch is bad time and again.
        ({"drift:grad_norm": 5}, None, "gradient_explosion"),
        ({"drift:loss": 4, "drift:grad_norm": 5}, None, "gradient_explosion"),
        ({"drift:loss": 5, "robust:loss": 8}, 1.0, "lr_too_high"),  # It climbed before it jumped.
        ({"drift:loss": 5, "robust:loss": 7}, 1.0, "bad_sample"),
        ({"drift:loss": 5, "robust:loss": 8, "robust:grad_norm": 4}, 9.0, "gradient_explosion"),
        ({"robust:loss": 5, "oscillation:loss": 9}, 9.0, "unknown"),  # The aftermath of a jump.
        ({}, 1.0, "unknown"),
    ],
)
def test_classes_are_asked_in_order(signs, ratio, expected):
    """What is not finite comes before the gradient, and the gradient before the data (R18)."""
    assert classify(signs, ratio) == expected


@pytest.mark.parametrize(("began", "expected"), [(8, "unknown"), (7, "lr_too_high")])
def test_a_drift_found_at_once_is_a_jump(incident, began, expected):
    """Three bad batches add up to a drift as well; a climb is what began three steps before it was found, or more."""
    incident.add(verdict(10, "drift", first_step=began), 9.0)
    assert incident.class_ == expected
    for unrecovered in (3, 10, 0):
        incident.follow(20, unrecovered)
    assert incident.class_ == ("bad_sample" if expected == "unknown" else expected)


def test_the_gradient_of_the_jump_decides(incident):
    """Whether the gradient was calm is read at the step where the loss jumped, not at a later one."""
    incident.add(verdict(10), 2.5)
    incident.add(verdict(11), 1.0)
    assert incident.class_ == "unknown"
    other = Incident(id=2, first_step=10, detected_step=10, last_step=10)
    other.add(verdict(10), 1.0)
    other.add(verdict(11), 2.5)
    assert other.class_ == "bad_sample"


def test_tried_gives_the_remedies_of_one_kind(incident):
    """Remedies are asked for by action, oldest first."""
    for step, action in enumerate(("clip", "rollback", "clip")):
        incident.remedies.append(Remedy(action=action, step=step, steps_total=step, source="local", outcome="done"))
    assert [remedy.step for remedy in incident.tried("clip")] == [0, 2]
    assert incident.tried("lower_lr") == []


@pytest.mark.parametrize("ratio", [math.nan, math.inf, 1.2])
def test_an_incident_survives_json_whatever_its_numbers(incident, ratio):
    """NaN and Inf in a verdict or a ratio never break the record: it is read back as it was."""
    incident.add(verdict(10, value=math.nan, baseline=math.inf), ratio)
    incident.add(verdict(11, "nonfinite", value=math.nan, baseline=math.nan), math.nan)
    incident.remedies.append(Remedy(action="clip", step=1, steps_total=1, source="local", outcome="done", detail="x"))
    text = msgspec.json.encode(incident)
    assert msgspec.json.decode(text, type=Incident) == incident
    assert b'"class":"numerical"' in text
