"""Long runs (`make soak`): Alertmanager's repeats at minutes, and the stories of the rules twenty times."""

import subprocess

import pytest
from delivery import Sink
from test_alertmanager import repeats
from test_rules import STORIES
from tools import find_tool

pytestmark = pytest.mark.soak


@pytest.mark.timeout(1200)
def test_m03_repeats_at_1_and_3_minutes_come_when_they_are_due(tmp_path):
    """Case M03 in its own time: each repeat after 3 minutes, within one interval, and no second command."""
    sink = Sink()
    try:
        gaps, waiting, _ = repeats(tmp_path, sink, group_interval="1m", repeat_interval="3m", times=2)
    finally:
        sink.close()
    assert len(gaps) >= 2
    assert all(170.0 < gap < 245.0 for gap in gaps)
    assert len(waiting) == 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_r07_the_stories_come_true_twenty_times(path):
    """Case R07: no story depends on the order of things."""
    for _ in range(20):
        done = subprocess.run(
            [find_tool("promtool"), "test", "rules", path], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
