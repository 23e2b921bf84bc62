"""Plain values: what a checkpoint holds beside its tensors, copied, and stored so that reading runs no code."""

import io
from copy import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor


def encode_plain(plain: dict[str, Any]) -> bytes:
    """The plain half of a snapshot as bytes that can be read back without running any code.

    Raises:
        ValueError: something in it is no plain value; the message says what.
    """
    buffer = io.BytesIO()
    try:
        torch.save(plain, buffer)
        decode_plain(buffer.getvalue())
    except Exception as error:
        reason = _odd_value(plain, "") or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ValueError(f"a state_dict holds what cannot be stored as plain values: {reason}") from error
    return buffer.getvalue()


def decode_plain(content: bytes) -> dict[str, Any]:
    """The inverse of `encode_plain`; refuses anything but plain values and tensors."""
    plain: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return plain


def plain_copy(value: Any) -> Any:  # noqa: ANN401 - any tree of plain values
    """A deep copy, numpy scalars turned into Python's own."""
    if isinstance(value, dict):
        copied = copy(value)  # Keeps its type: a scheduler's milestones are a Counter.
        for key, item in value.items():
            copied[key] = plain_copy(item)
        return copied
    if isinstance(value, list | tuple):
        return type(value)(plain_copy(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    return value.clone() if isinstance(value, Tensor) else value


def _odd_value(value: Any, path: str) -> str | None:  # noqa: ANN401 - any tree
    """Where in a tree the first value lies that is not plain, and what it is."""
    if value is None or isinstance(value, bool | int | float | str | bytes | Tensor | torch.dtype | torch.device):
        return None
    if isinstance(value, dict):
        found = (_odd_value(item, f"{path}.{key}" if path else str(key)) for key, item in value.items())
    elif isinstance(value, list | tuple):
        found = (_odd_value(item, f"{path}[{place}]") for place, item in enumerate(value))
    else:
        return f"`{path}` is a {type(value).__name__}"
    return next(filter(None, found), None)
