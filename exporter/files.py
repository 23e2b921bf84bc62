"""The rules and configurations in the installed package, and how to get them out of it."""

import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

PACKAGE = "alert_rules"
# Prometheus reads a relative path from the folder of its configuration, and the job writes where it runs.
_TARGETS = b"runs/targets/"
_ENDINGS = (".yml", ".md", ".tmpl")


def write_files(out: Path, source: Traversable | None = None, *, runs: Path) -> list[Path]:
    """Copy the files to `out/alert_rules`; what is there already must be the same. All of them, or none.

    Args:
        out: the folder in which to make `alert_rules`.
        source: the folder to copy from; the installed package by default.
        runs: the folder of the runs, in which prometheus.yml will look for targets.

    Returns:
        The files, in the order of their names.

    Raises:
        FileExistsError: a file is there with other content.
        FileNotFoundError: the package holds no files.
        OSError: a file could not be written.
    """
    source = files(PACKAGE) if source is None else source
    folder = out / PACKAGE
    contents = {
        folder / entry.name: entry.read_bytes().replace(_TARGETS, b"%s/targets/" % os.fsencode(runs.absolute()))
        for entry in sorted(source.iterdir(), key=lambda entry: entry.name)
        if entry.is_file() and entry.name.endswith(_ENDINGS)
    }
    if not contents:
        raise FileNotFoundError(f"no files in the package {PACKAGE}: the installation is not complete")
    for path, content in contents.items():
        if path.is_symlink() or path.is_dir() or (path.exists() and path.read_bytes() != content):
            raise FileExistsError(f"{path} is there and differs: nothing was written; move it away first")
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in contents.items():
        if not path.exists():
            path.write_bytes(content)
    return list(contents)
