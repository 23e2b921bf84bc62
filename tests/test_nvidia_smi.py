"""The comparison with nvidia-smi of `make gpu-check`, on what nvidia-smi would say of the fake driver."""

import pytest
from fake_nvml import FakeDriver, worker_on
from nvidia_smi import QUERY, differences

from trainer_plugin.faults.driver import h100s, uuid

AGREED = {
    "uuid": uuid(0), "name": "NVIDIA H100 80GB HBM3", "pci.bus_id": "00000000:0A:00.0", "temperature.gpu": "62",
    "temperature.memory": "71", "memory.total": "81920", "memory.reserved": "616",
    "ecc.errors.uncorrected.volatile.total": "21", "ecc.errors.corrected.volatile.total": "20",
    "remapped_rows.uncorrectable": "32", "remapped_rows.correctable": "31", "power.draw": "480.25", "clocks.sm": "1755",
    "clocks.mem": "2619",
}  # fmt: skip


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A page of one GPU."""
    with worker_on(FakeDriver(tmp_path_factory.mktemp("driver"), h100s(1))) as worker:
        yield worker.next()


def told(**changes: str) -> str:
    """A line of nvidia-smi's CSV."""
    values = AGREED | {key.replace("_at_", "."): value for key, value in changes.items()}
    return ", ".join(values[key] for key in QUERY) + "\n"


def test_what_agrees_is_no_difference(shown):
    """Values that moved a little between two readings, and what nvidia-smi does not know, are no difference."""
    assert differences(shown, told()) == []
    assert differences(shown, told(temperature_at_memory="N/A")) == []
    assert differences(shown, told(temperature_at_memory="[N/A]")) == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"memory_at_total": "81559"}, "memory.total: 81920.0, nvidia-smi says 81559.0"),
        ({"power_at_draw": "612345"}, "power.draw: 612.345, nvidia-smi says 612345.0"),
        ({"name": "other"}, "modelName: 'NVIDIA H100 80GB HBM3', nvidia-smi says 'other'"),
        ({"uuid": "GPU-x"}, "temperature.gpu: None, nvidia-smi says 62"),
    ],
)
def test_a_wrong_unit_value_or_label_is_told(shown, changes, line):
    """A unit, a value or a label that is another one is a line that names both."""
    assert any(line in difference for difference in differences(shown, told(**changes)))
