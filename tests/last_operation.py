"""Being killed at a file operation: for tests of what is on disk whichever of them was the last."""

import os
import signal
import sys
from pathlib import Path

_REMOVALS = {"os.remove", "os.rmdir"}  # By names within a folder that is open.
_OPERATIONS = {"open", "os.mkdir", "os.rename", "shutil.rmtree", "os.listdir", "os.scandir"}


def be_killed_at(folder: Path, end: int) -> None:
    """Let this process be killed when it begins the file operation below `folder` with this number, from 1 on."""
    count = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal count
        if event in _REMOVALS or (event in _OPERATIONS and str(folder) in str(arguments[0])):
            count += 1
            if count == end:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
