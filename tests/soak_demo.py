"""The demo's other scenarios to their ends, without servers (`make soak`); test_loop.py runs those with them."""

import pytest
from test_loop import run_demo

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("scenario", "class_"),
    [
        ("bad-sample", "bad_sample"),
        ("lr-too-high", "lr_too_high"),
        ("numerical", "numerical"),
        ("hardware", "hardware"),
    ],
)
def test_each_scenario_heals_and_is_called_by_its_name(tmp_path, scenario, class_):
    """The demo ends well only if its class, its remedies and its loss are what the scenario wants."""
    result = run_demo("--scenario", scenario, "--local-only", out=tmp_path / "out")

    assert [incident["class"] for incident in result["incidents"]][:1] == [class_]
    assert all(incident["healed"] for incident in result["incidents"])
    actions = [r["action"] for incident in result["incidents"] for r in incident["remedies"]]
    assert ("rollback" in actions) == (scenario == "hardware")
    evidence = " ".join(line for incident in result["incidents"] for line in incident["evidence"])
    if scenario == "hardware":
        assert "lower_lr" not in actions
        assert "TrainGpuFault: 1 of its GPUs report a fault: rank 0 on GPU-00000000" in evidence
