"""The rules, dashboards and configurations in the installed package, and how to get them out of it."""

import os
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from exporter.kubernetes import to_kubernetes

RULES = "alert_rules"
PACKAGES = (RULES, "grafana_dashboards")
# Prometheus reads a relative path from the folder of its configuration, and the job writes where it runs.
_TARGETS = b"runs/targets/"
_ENDINGS = (".yml", ".yaml", ".md", ".tmpl", ".csv", ".json", ".sbatch")
# Those of docker-compose.yml, which is not in the package.
_LEFT_OUT = {"compose"}


def packaged_files(packages: Mapping[str, Traversable] | None = None, *, runs: Path) -> dict[str, bytes]:
    """What the packages hold, by its path, and the rules and routes as objects for Kubernetes.

    Args:
        packages: the folders to read by the names they get; those of the installed package by default.
        runs: the folder of the runs, in which prometheus.yml will look for targets.

    Raises:
        FileNotFoundError: a package holds no files.
    """
    packages = {name: files(name) for name in PACKAGES} if packages is None else packages
    contents: dict[str, bytes] = {}
    for name, folder in packages.items():
        found = dict(_read(folder, name))
        if not found:
            raise FileNotFoundError(f"no files in the package {name}: the installation is not complete")
        contents |= found
    if f"{RULES}/prometheus.yml" in contents:
        contents |= to_kubernetes(contents, RULES)
    targets = b"%s/targets/" % os.fsencode(runs.absolute())
    return {name: content.replace(_TARGETS, targets) for name, content in sorted(contents.items())}


def write_files(out: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write the contents below `out`; what is there already must be the same. All of them, or none.

    Raises:
        FileExistsError: a file is there with other content.
        OSError: a file could not be written.
    """
    paths = {out / name: content for name, content in contents.items()}
    for path, content in paths.items():
        if path.is_symlink() or path.is_dir() or (path.exists() and path.read_bytes() != content):
            raise FileExistsError(f"{path} is there and differs: nothing was written; move it away first")
    for path, content in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(content)
    return list(paths)


def _read(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_file() and entry.name.endswith(_ENDINGS):
            yield f"{name}/{entry.name}", entry.read_bytes()
        elif entry.is_dir() and entry.name not in _LEFT_OUT:
            yield from _read(entry, f"{name}/{entry.name}")
