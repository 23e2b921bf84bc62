"""Many kills (`make soak`): a training job killed 50 times at random moments of save, copy, rotation and restore."""

import pytest
from kills import kill_again_and_again

pytestmark = [
    pytest.mark.soak,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.mark.timeout(900)
def test_c01_after_each_of_50_kills_there_is_a_whole_proven_checkpoint(tmp_path):
    """Nothing half is ever listed, leftovers are gone at the next start, and a proven checkpoint loads each time."""
    moments = kill_again_and_again(tmp_path, 50, seed=0)
    print(dict(moments))  # Shown with -s: what was hit.
    assert moments["with a proven checkpoint"] >= 40
