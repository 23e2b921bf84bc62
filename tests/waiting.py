"""Waiting for something to become so, in tests and benchmarks: the one place that asks again and again."""

import threading
import time
from collections.abc import Callable
from typing import Any


def wait_for(
    condition: Callable[[], Any],
    seconds: float = 8.0,
    *,
    pause_seconds: float = 0.002,
    meanwhile: Callable[[], object] = lambda: None,
) -> Any:
    """The first true value of `condition`, with a pause and whatever is to go on `meanwhile` between two looks.

    Raises:
        TimeoutError: it did not come.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so within {seconds} s: {condition}")
        meanwhile()
        threading.Event().wait(pause_seconds)
    return value
