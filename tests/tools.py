"""Finds the programs of Prometheus, Alertmanager and VictoriaMetrics that tests run."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
_FETCHED = ROOT / ".tools"
_DOWNLOADED = _FETCHED / "usr" / "bin"

# The Debian releases whose servers are tested, oldest first: Prometheus 2.42, 2.53 and 3.5; Alertmanager 0.25, 0.28 and
# 0.33 (of sid: or newer). `make tools` fetches the first and the last, `make tools-all` all.
RELEASES = ("bookworm", "trixie", "sid")
OLDEST, NEWEST = RELEASES[0], RELEASES[-1]


def find_tool(name: str) -> Path:
    """The program `name`, from PATH or from what `make tools` has put into the checkout.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    found = shutil.which(name) or shutil.which(name, path=os.fspath(_DOWNLOADED))
    if found is None:
        raise FileNotFoundError(f"{name} is neither on PATH nor in {_DOWNLOADED}: run `make tools` first")
    return Path(found)


def programs_of(release: str, fetched: Path = _FETCHED) -> Path:
    """The folder of a release's programs, as tests/fetch_tools.sh has left it in `fetched`.

    Where the release could not be had, the test is skipped, and told why.

    Raises:
        FileNotFoundError: it has not been fetched yet.
    """
    folder, missing = fetched / release / "usr" / "bin", fetched / f"{release}.missing"
    if folder.is_dir():
        return folder
    if missing.exists():
        pytest.skip(f"{release} cannot be had: {missing.read_text().strip()}")
    raise FileNotFoundError(f"{release} is not in {fetched}: run `make tools-all` first")
