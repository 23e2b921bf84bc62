"""Finds the programs of Prometheus and Alertmanager that tests run."""

import os
import shutil
from pathlib import Path

_DOWNLOADED = Path(__file__).resolve().parent.parent / ".tools" / "usr" / "bin"


def find_tool(name: str) -> Path:
    """The program `name`, from PATH or from what `make tools` has put into the checkout.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    found = shutil.which(name) or shutil.which(name, path=os.fspath(_DOWNLOADED))
    if found is None:
        raise FileNotFoundError(f"{name} is neither on PATH nor in {_DOWNLOADED}: run `make tools` first")
    return Path(found)
