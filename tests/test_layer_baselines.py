"""Layer baselines: each layer's gradient norm against its own past, which no outlier enters."""

import json
import math

import numpy as np
import pytest

from trainer_plugin.detection.layer_baselines import LayerBaselines


def calm(seed: int = 0, steps: int = 300) -> list[dict[str, float]]:
    """Norms of two layers of different size, with a tenth of noise."""
    noise = np.random.default_rng(seed).normal(0.0, 0.1, (steps, 2))
    return [{"wte": 5.0 * math.exp(a), "blocks.0": 0.01 * math.exp(b)} for a, b in noise]


@pytest.fixture
def baselines():
    """Baselines that have seen a calm run."""
    baselines = LayerBaselines(alpha=0.99)
    for norms in calm():
        baselines.update(norms, learn=True)
    return baselines


def test_each_layer_is_held_against_itself(baselines):
    """A layer at its own level has ratio 1, whatever its size; the one that surges shows by how much."""
    baselines.update({"wte": 5.0, "blocks.0": 0.2}, learn=False)
    assert baselines.ratios["wte"] == pytest.approx(1.0, rel=0.1)
    assert baselines.ratios["blocks.0"] == pytest.approx(20.0, rel=0.1)


def test_a_layer_without_a_past_is_not_judged():
    """For the first 50 values there is no ratio; then there is one."""
    baselines = LayerBaselines(alpha=0.99)
    judged = []
    for norms in calm(steps=60):
        baselines.update(norms, learn=True)
        judged.append("wte" in baselines.ratios)
    assert judged == [False] * 50 + [True] * 10


@pytest.mark.parametrize("times", [100.0, 0.01])
def test_no_outlier_enters_a_baseline(baselines, times):
    """After 20 steps far above (or below) its past a layer's baseline has not moved by a bit, the other's has."""
    before = baselines.state_dict()
    for _ in range(20):
        baselines.update({"wte": 5.1, "blocks.0": 0.01 * times}, learn=True)
    after = baselines.state_dict()
    assert after["blocks.0"][0] == before["blocks.0"][0]
    assert after["wte"][0] != before["wte"][0]


def test_what_lasts_is_the_new_level(baselines):
    """A layer that stays ten times as high in calm steps is an outlier for 200 of them, and then has a new past."""
    for _ in range(199):
        baselines.update({"blocks.0": 0.1}, learn=True)
    assert baselines.ratios["blocks.0"] == pytest.approx(10.0, rel=0.1)
    for _ in range(60):
        baselines.update({"blocks.0": 0.1}, learn=True)
    assert baselines.ratios["blocks.0"] == pytest.approx(1.0)


def test_in_an_incident_nothing_is_learnt(baselines):
    """Without `learn` no number of the past changes, however long."""
    before = baselines.state_dict()
    for _ in range(300):
        baselines.update({"wte": 6.0, "blocks.0": 0.5, "new": 1.0}, learn=False)
    after = baselines.state_dict()
    assert {layer: after[layer] for layer in before} == before
    assert "new" not in baselines.ratios


@pytest.mark.parametrize("norm", [math.nan, math.inf, 0.0])
def test_what_is_no_norm_is_neither_judged_nor_learnt(baselines, norm):
    """NaN, Inf and 0 have no ratio, and leave the past alone."""
    before = baselines.state_dict()
    baselines.update({"blocks.0": norm}, learn=True)
    assert baselines.ratios == {}
    assert baselines.state_dict() == before


def test_the_state_goes_on_the_same_after_json(baselines):
    """Baselines that take over a state, through JSON, say the same of the next steps."""
    other = LayerBaselines(alpha=0.99)
    other.load_state_dict(json.loads(json.dumps(baselines.state_dict())))
    for norms in calm(seed=1, steps=30):
        baselines.update(norms, learn=True)
        other.update(norms, learn=True)
        assert other.ratios == baselines.ratios
