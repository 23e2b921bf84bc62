"""The verdict of a replay: from what was found to one line that names one culprit, or says that there is none."""

import math

import pytest

from trainer_plugin.replay.finding import Elsewhere, Finding, Measured
from trainer_plugin.replay.normal import Normal
from trainer_plugin.replay.samples import Sample
from trainer_plugin.replay.verdict import decide

NORMAL = Normal(loss=2.0, loss_scale=0.1, grad_norm=1.0, grad_norm_log_scale=0.1)
LAYERS = ("wte", "blocks.0", "blocks.1", "head")


def measured(loss: float = 2.0, norm: float = 1.0, **layers) -> Measured:
    """Loss and norms; layers not named are normal."""
    return Measured(loss=loss, grad_norm=norm, layer_grad_norms={layer: layers.get(layer, 1.0) for layer in LAYERS})


def sample(index: int, loss: float, without: float, **changes) -> Sample:
    """One of three samples."""
    return Sample(**{"index": index, "id": f"s{index}", "loss": loss, "loss_without": without, **changes})


def found(**changes) -> Finding:
    """A step with a spike of which nothing more is known."""
    fields = {
        "scene": "x", "run": "tiny", "step": 9, "weights_step": 8, "incident": 1, "class_": "unknown", "factory": "a:b",
        "torch": {}, "normal": measured(), "recorded": measured(6.0), "replayed": measured(6.0),
        "layer_order": list(LAYERS),
    }  # fmt: skip
    return Finding(**{**fields, **changes})


EARLIER = Elsewhere(step=5, measured=measured(2.1))
BAD_SAMPLES = [sample(1, 14.0, 2.1), sample(0, 2.0, 8.0), sample(2, 2.0, 8.0)]
ODD_SAMPLES = [sample(1, math.nan, 2.1, adds=math.inf), sample(0, 2.0, math.nan), sample(2, 2.0, math.nan)]


@pytest.mark.parametrize(
    ("finding", "kind", "name"),
    [
        (found(samples=BAD_SAMPLES), "sample", "s1"),
        (found(samples=BAD_SAMPLES, other_batch=Elsewhere(step=8, measured=measured(2.2))), "sample", "s1"),
        (found(samples=BAD_SAMPLES, other_batch=Elsewhere(step=8, measured=measured(5.0))), "weights", ""),
        (found(other_batch=Elsewhere(step=8, measured=measured(math.nan))), "weights", ""),
        (found(same_batch=EARLIER), "weights", ""),
        (found(same_batch=EARLIER, weight_changes={"wte": 0.1, "blocks.1": 2.0, "head": 0.2}), "layer", "blocks.1"),
        (found(same_batch=EARLIER, weight_changes={"wte": 0.1, "blocks.1": 0.5, "head": 0.2}), "weights", ""),
        (found(), "batch", ""),
        (found(recorded=measured(2.1), replayed=measured(2.1), samples=BAD_SAMPLES), "unknown", ""),
        (found(nonfinite_weights=["head", "blocks.0"]), "layer", "blocks.0"),
        (found(nonfinite_weights=list(LAYERS)), "weights", ""),
        (found(replayed=measured(math.nan, math.nan), samples=ODD_SAMPLES), "sample", "s1"),
        (found(replayed=measured(math.nan, math.nan), first_nonfinite="blocks.1.mlp.up"), "layer", "blocks.1"),
        (found(replayed=measured(2.0, math.nan, wte=math.nan, **{"blocks.0": math.nan})), "layer", "blocks.0"),
        (found(replayed=measured(math.nan, math.nan)), "unknown", ""),
        (found(recorded=measured(2.0, 1e4, head=1e4), replayed=measured()), "layer", "head"),
        (found(recorded=measured(2.0, 1e4, wte=9e3, **{"blocks.0": 9e3}), replayed=measured()), "layer", "blocks.0"),
        (found(recorded=measured(2.0, math.nan, head=math.nan), replayed=measured()), "layer", "head"),
        (found(recorded=measured(2.0, 9e3, **dict.fromkeys(LAYERS, 9e3)), replayed=measured()), "unknown", ""),
        (found(recorded=measured(6.0, head=0.0), replayed=measured(6.0, head=0.0), same_batch=EARLIER), "weights", ""),
        (found(recorded=measured(2.0, head=1.0), replayed=measured(2.0, head=0.0)), "layer", "head"),
        (found(recorded=measured(math.nan), replayed=measured()), "unknown", ""),
        (found(recorded=measured(9.0), samples=BAD_SAMPLES), "unknown", ""),
        (found(recorded=measured(9.0), weights_step=9, samples=BAD_SAMPLES), "sample", "s1"),
        (found(replayed=None, notes=["no batch"]), "unknown", ""),
        (found(replayed=None, recorded=measured(2.0, math.nan, head=math.nan)), "layer", "head"),
    ],
)
def test_each_finding_has_its_verdict(finding, kind, name):
    """What is not finite goes first, then what did not come from batch and weights, the weights, and the samples."""
    verdict = decide(finding, NORMAL)
    assert (verdict.kind, verdict.name) == (kind, name), verdict.line
    assert verdict.line.startswith(
        {"sample": "sample 2 of 3 (id s1): ", "layer": f"layer {name}: "}.get(kind, "neither: ")
    )
    assert "\n" not in verdict.line


def test_a_gradient_alone_is_enough_for_a_sample():
    """The loss is normal and the norm is not: what the norm would have been without the sample counts."""
    samples = [sample(2, 2.1, 2.0, grad_norm_without=1.1), sample(0, 2.1, 2.0, grad_norm_without=50.0)]
    samples.append(sample(1, 2.1, 2.0, grad_norm_without=50.0))
    finding = found(recorded=measured(2.1, 50.0), replayed=measured(2.1, 50.0), samples=samples)
    verdict = decide(finding, NORMAL)
    assert (verdict.kind, verdict.name) == ("sample", "s2")


def test_where_nothing_is_known_to_be_normal_nobody_is_accused():
    """A scene of a run's first step: its loss is high against nothing."""
    normal = Normal(loss=math.nan, loss_scale=1e-12, grad_norm=math.nan, grad_norm_log_scale=0.01)
    assert decide(found(same_batch=EARLIER), normal).kind == "unknown"
