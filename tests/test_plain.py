"""Plain values: copied with nothing shared, stored so that reading runs no code, and anything else refused."""

import collections

import numpy as np
import pytest
import torch

from trainer_plugin.checkpoints.plain import decode_plain, encode_plain, plain_copy


def test_a_copy_shares_nothing():
    """Lists, mappings and tensors in a copy are its own; numpy's numbers become Python's."""
    value = {"list": [1, {"tensor": torch.ones(2)}], "number": np.float64(0.5), "pair": (1, 2)}
    copied = plain_copy(value)
    value["list"][1]["tensor"].zero_()
    value["list"].append(3)
    assert copied["list"][1]["tensor"].tolist() == [1.0, 1.0]
    assert len(copied["list"]) == 2
    assert type(copied["number"]) is float
    assert copied["pair"] == (1, 2)


def test_a_mapping_keeps_its_type():
    """A scheduler's milestones are a Counter, and it asks for what only that has."""
    assert type(plain_copy({"milestones": collections.Counter({3: 1})})["milestones"]) is collections.Counter


def test_what_is_stored_comes_back():
    """Values and tensors of any depth are the same after a way through bytes."""
    value = {"a": [1, 2.5, None, "text", b"bytes", (True,)], "b": {"c": torch.arange(3)}}
    found = decode_plain(encode_plain(value))
    assert found["a"] == value["a"]
    assert torch.equal(found["b"]["c"], value["b"]["c"])


@pytest.mark.parametrize(
    ("odd", "told"),
    [(object(), "`scheduler.deep[1]` is a object"), (lambda: None, "`scheduler.deep[1]` is a function")],
)
def test_what_is_not_plain_is_refused_in_one_line(odd, told):
    """An arbitrary object in a state_dict is refused, by its place, before anything depends on it."""
    with pytest.raises(ValueError, match="cannot be stored as plain values") as caught:
        encode_plain({"scheduler": {"deep": [1, odd]}})
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
