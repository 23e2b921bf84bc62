"""Kept memory: filled again and again with what a state is, never while it is read, and never more of it."""

import threading

import pytest
import torch

from trainer_plugin.checkpoints.slots import Slots
from trainer_plugin.checkpoints.snapshot import Snapshot


def state(value: float, **tensors: torch.Tensor) -> Snapshot:
    """A state with one weight, and more."""
    return Snapshot(tensors={"model/weight": torch.full((4, 8), value), **tensors}, plain={"value": value})


def addresses(slots: Slots) -> dict[str, int]:
    """Where in memory the only slot keeps its tensors."""
    (slot,) = slots._slots
    return {name: tensor.data_ptr() for name, tensor in slot.snapshot.tensors.items()}


def test_what_is_taken_is_a_copy_with_every_bit():
    """Tensors of any dtype, shape and order in memory are held as they were, whatever is done to them afterwards."""
    tensors = {
        "model/half": torch.tensor([0.1, -0.0, float("inf"), float("nan")], dtype=torch.bfloat16),
        "model/turned": torch.arange(6.0).reshape(2, 3).t(),
        "model/repeated": torch.tensor([1.0]).expand(3),
        "model/empty": torch.zeros(0, 3),
        "count": torch.tensor(2**62),
        "mask": torch.tensor([True, False]),
    }
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    slots = Slots(1)
    slots.take(state(1.0, **tensors), "a")
    for name in ("model/half", "model/turned", "count", "mask"):
        tensors[name].zero_()
    held = slots.find("a")
    assert held.plain == {"value": 1.0}
    for name, tensor in wanted.items():
        assert held.tensors[name].dtype == tensor.dtype
        assert torch.equal(held.tensors[name].nan_to_num(nan=7.0), tensor.nan_to_num(nan=7.0))


def test_memory_is_used_again():
    """The next state lies where the last one lay; what is new or of another kind gets memory of its own."""
    slots = Slots(1)
    slots.take(state(1.0, a=torch.zeros(3), b=torch.zeros(3)), "1").release()
    first = addresses(slots)
    slots.take(state(2.0, a=torch.ones(3), b=torch.ones(3, dtype=torch.float64), c=torch.ones(2)), "2").release()
    second = addresses(slots)
    assert (second["model/weight"], second["a"]) == (first["model/weight"], first["a"])
    assert slots.find("2").tensors["b"].dtype == torch.float64
    assert torch.equal(slots.find("2").tensors["model/weight"], torch.full((4, 8), 2.0))
    slots.take(state(3.0), "3")
    assert slots.find("3").tensors.keys() == {"model/weight"}


def test_what_is_held_is_not_overwritten():
    """A slot is free again when everybody who reads it has let it go."""
    slots = Slots(1)
    slot = slots.take(state(1.0), "1")
    slot.hold()
    assert slots.take(state(2.0), "2") is None
    slot.release()
    assert slots.take(state(2.0), "2") is None
    assert slots.find("1").plain == {"value": 1.0}
    slot.release()
    assert slots.take(state(2.0), "2") is slot


def test_the_oldest_snapshot_makes_room():
    """With two slots the two newest snapshots are there, and the older of them goes first."""
    slots = Slots(2)
    for number in range(5):
        slots.take(state(float(number)), str(number)).release()
    assert [slots.find(str(number)) is not None for number in range(5)] == [False, False, False, True, True]


def test_a_held_slot_is_passed_over():
    """A reader that hangs on one of two slots costs that one only."""
    slots = Slots(2)
    slots.take(state(0.0), "0")
    for number in range(1, 4):
        slots.take(state(float(number)), str(number)).release()
    assert slots.find("0").plain == {"value": 0.0}
    assert slots.find("3").plain == {"value": 3.0}


def test_a_fill_that_fails_leaves_no_half_snapshot():
    """When memory runs out on the way, nothing is held under either name, and the slot can be used again."""
    slots = Slots(1)
    slots.take(state(1.0), "1").release()
    unreachable = torch.empty(3, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)):
        slots.take(state(2.0, a=unreachable), "2")
    assert slots.find("1") is slots.find("2") is None
    assert slots.take(state(3.0), "3") is not None


def test_memory_can_be_had_beforehand():
    """Touched in the background, it is there for the first state, also where that state has more in it."""
    slots = Slots(2)
    slots.touch(state(1.0).tensors)
    for thread in threading.enumerate():
        if thread.name == "checkpoint-memory":
            thread.join()
    kept = [slot._memory["model/weight"].data_ptr() for slot in slots._slots]
    slots.take(state(1.0), "1").release()
    slots.take(state(2.0, more=torch.ones(2)), "2").release()
    assert [slots.find(name).tensors["model/weight"].data_ptr() for name in "12"] == kept
    assert slots.find("2").tensors["more"].tolist() == [1.0, 1.0]
    slots.touch(state(1.0).tensors)  # Too late: what is held stays.
    for thread in threading.enumerate():
        if thread.name == "checkpoint-memory":
            thread.join()
    assert slots.find("2").tensors["more"].tolist() == [1.0, 1.0]
