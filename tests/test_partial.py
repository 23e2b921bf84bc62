"""Partial rollback: when it fits an incident, and which layers it takes."""

from collections.abc import Iterable

import pytest

from trainer_plugin.detection.readings import Readings
from trainer_plugin.policy.decisions import ActionsConfig
from trainer_plugin.policy.incidents import MAX_LAYERS, Incident, Remedy
from trainer_plugin.policy.partial import partial_layers, rollback_kind

MODEL = [f"blocks.{number}" for number in range(10)]
ON = ActionsConfig(partial_rollback=True)


def readings(layers: Iterable[str] = MODEL, **ratios: float) -> Readings:
    """Readings of a model of these layers, all calm but for some."""
    known = dict.fromkeys(Readings.__struct_fields__, 0.0)
    return Readings(**{**known, "layer_ratios": dict.fromkeys(layers, 1.0) | ratios})


def incident(*, class_: str = "gradient_explosion", **layers: float) -> Incident:
    """An open incident in which these layers have surged."""
    return Incident(id=1, first_step=9, detected_step=9, last_step=9, class_=class_, layers=layers)


def remedy(action: str, outcome: str) -> Remedy:
    """Something that was tried."""
    return Remedy(action=action, step=9, steps_total=9, source="local", outcome=outcome)


def test_it_fits_an_explosion_in_few_layers():
    """Or where nobody knows why: up to `partial_layers` layers of a model twice as large at least, and it is on."""
    surge = incident(a=12.0, b=5.0, c=4.0)
    assert rollback_kind(surge, readings(), ON) == "partial_rollback"
    assert rollback_kind(incident(class_="unknown", a=12.0), readings(), ON) == "partial_rollback"
    assert rollback_kind(surge, readings(), ActionsConfig()) == "rollback"
    assert rollback_kind(surge, readings(), ActionsConfig(partial_rollback=True, partial_layers=2)) == "rollback"


@pytest.mark.parametrize(
    "other",
    [incident(), incident(class_="lr_too_high", a=12.0), incident(class_="numerical", a=12.0), None],
    ids=["no layer", "learning rate", "numerical", "no incident"],
)
def test_it_fits_nothing_else(other):
    """Without layers that surged, or in an incident of another class, all of the run goes back."""
    assert rollback_kind(other, readings(), ON) == "rollback"


def test_most_of_a_small_model_is_not_few():
    """Three layers of five are more than half: that is no part any more."""
    small = readings("abcde")
    assert rollback_kind(incident(a=9.0, b=9.0, c=9.0), small, ON) == "rollback"
    assert rollback_kind(incident(a=9.0, b=9.0), small, ON) == "partial_rollback"


@pytest.mark.parametrize(
    ("action", "outcome", "kind"),
    [
        ("partial_rollback", "done", "rollback"),
        ("partial_rollback", "no_target", "rollback"),
        ("rollback", "failed", "rollback"),
        ("partial_rollback", "observed", "partial_rollback"),
        ("clip", "done", "partial_rollback"),
    ],
)
def test_it_is_tried_once_and_before_the_whole(action, outcome, kind):
    """What went back in part and did not heal, or has gone back whole, goes back whole."""
    surge = incident(a=12.0)
    surge.remedies.append(remedy(action, outcome))
    assert rollback_kind(surge, readings(), ON) == kind


def test_the_layers_that_surged_most_are_taken_and_the_first_is_the_worst():
    """By the largest ratio in the incident; in a calm run, which only a person's command may hit, by the last step."""
    assert partial_layers(incident(a=4.0, b=9.0, c=5.0), readings(z=50.0), 2) == ("b", "c")
    assert partial_layers(incident(), readings(z=2.0, y=1.5), 2) == ("z", "y")
    assert partial_layers(incident(), None, 2) == ()


def test_an_incident_keeps_the_largest_ratio_of_the_layers_that_surged():
    """A ratio of 3 and less is none; later smaller ones change nothing; only so many layers are kept."""
    found = incident()
    found.surge({"a": 3.0, "b": 4.0})
    found.surge({"a": 1.0, "b": 3.5, "c": 8.0})
    assert found.layers == {"c": 8.0, "b": 4.0}
    found.surge({f"blocks.{number}": 5.0 + number for number in range(100)})
    assert len(found.layers) == MAX_LAYERS
    assert next(iter(found.layers.items())) == ("blocks.99", 104.0)
