"""Long restarts (`make soak`): 300 steps, and 150 with a kill -9 and the rest in a new process, end the same."""

from pathlib import Path

import pytest
import torch
from loaders import LONG_SIZE, LoaderJob, assert_equal_but_for_the_start, close
from test_restart import kill, start

PROGRAM = Path(__file__).with_name("loaders.py")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", [(155,), (155, 214, 293)], ids=["once", "three-times"])
@pytest.mark.parametrize(("kind", "workers"), [("index", 0), ("index", 2), ("stateful", 0), ("stateful", 2)])
def test_150_and_kill_and_resume_to_300_equals_300_straight(tmp_path, kind, workers, kills):
    """Weights, moments, schedule, scaler, random draws and the order of the samples are those of an undisturbed run.

    Dropout, two micro-batches a step, fp16 with its scaler; a checkpoint each ten steps, the kills in between.
    """
    saved = 0
    for pause_at in (*kills, 0):
        job = start(tmp_path, kind, str(workers), pause_at=pause_at, until=300, program=PROGRAM)
        try:
            assert job.stdout.readline() == f"from {saved}\n"
            if pause_at:
                assert job.stdout.readline() == f"at {pause_at}\n"
                saved = pause_at // 10 * 10
            else:
                assert job.wait(300) == 0
        finally:
            kill(job)
    straight = LoaderJob(tmp_path / "straight", kind, workers=workers, size=LONG_SIZE)
    straight.run(300)
    close(straight.guard)
    resumed = torch.load(tmp_path / "outcome.pt", weights_only=False)
    assert_equal_but_for_the_start(resumed, straight.outcome(), steps=saved)
