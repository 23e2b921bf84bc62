"""Tensors on disk: every dtype and shape comes back bit for bit, from one process, without a warning."""

import io
import os
import pickle
from enum import Enum

import pytest
import torch

from trainer_plugin.checkpoints.tensor_files import read_tensors, write_tensors

TENSORS = {
    "model/weight": torch.randn(5, 7, generator=torch.Generator().manual_seed(0)),
    "model/half": torch.tensor([0.1, -0.0, float("inf")], dtype=torch.bfloat16),
    "model/poisoned": torch.tensor([float("nan")]),
    "model/empty": torch.zeros(0, 3),
    "model/turned": torch.arange(6.0).reshape(2, 3).t(),
    "buffer": torch.tensor([True, False]),
    "optimizer/0/weight/step": torch.tensor(3.0),
    "count": torch.tensor(2**62),
}


def test_tensors_come_back_as_they_were(tmp_path):
    """Names, shapes, dtypes and bits are the same; also of empty, scalar and transposed tensors."""
    write_tensors(tmp_path, TENSORS)
    found = read_tensors(tmp_path)
    assert found.keys() == TENSORS.keys()
    for name, wanted in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(found[name].nan_to_num(nan=7.0), wanted.nan_to_num(nan=7.0))


class ByName(pickle.Pickler):
    """Pickles an enumeration's member as an attribute of its class, as Python 3.11.2 does; others do so by value."""

    def reducer_override(self, value):
        """As in the base class."""
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Value:
    """Pickles as a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        """The call."""
        return self.call[0], self.call[1:]


def pickled(value):
    """The bytes of a value, enumerations by name."""
    file = io.BytesIO()
    ByName(file).dump(value)
    return file.getvalue()


def test_metadata_of_any_python_can_be_read(tmp_path):
    """Versions of Python differ in how they pickle an enumeration."""
    write_tensors(tmp_path, TENSORS)
    path = tmp_path / ".metadata"
    path.write_bytes(pickled(pickle.loads(path.read_bytes())))  # noqa: S301 - just written
    assert b"getattr" in path.read_bytes()
    assert torch.equal(read_tensors(tmp_path)["model/weight"], TENSORS["model/weight"])


@pytest.mark.parametrize(
    "value",
    [Value(os.getcwd), Value(getattr, dict, "fromkeys"), Value(getattr, torch.Size, "numel"), Value(eval, "1 + 1"), {}],
    ids=["call", "attribute", "attribute of what is known", "code", "nothing of the kind"],
)
def test_metadata_that_is_anything_else_is_refused(tmp_path, value):
    """What could run code is not even looked up."""
    write_tensors(tmp_path, TENSORS)
    (tmp_path / ".metadata").write_bytes(pickled(value))
    with pytest.raises(ValueError, match=r"\.metadata: "):
        read_tensors(tmp_path)


def test_no_tensors_are_a_state_too(tmp_path):
    """An empty set of tensors can be written and read."""
    write_tensors(tmp_path, {})
    assert read_tensors(tmp_path) == {}


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    """Where the folder cannot be written or read, the caller hears of it."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        write_tensors(tmp_path / "file" / "folder", TENSORS)
    with pytest.raises(OSError, match="none"):
        read_tensors(tmp_path / "none")
