"""Whose work runs on a GPU: Slurm job, Kubernetes pod and rank, told apart from the GPU's own series.

From the processes that the driver names, through /proc: it needs the host's process ids (`hostPID: true` in a pod) and,
for ranks, the right to read their environment. And from a folder that Slurm's prolog fills as for dcgm-exporter: one
file for each GPU index (or `index.instance`), each line a job id.
"""

import re
from collections.abc import Iterable
from pathlib import Path

_SLURM = re.compile(r"/job_(\d+)")
_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})")
_MOST_BYTES = 65536
LABELS = ("hpc_job", "pod_uid", "rank")


def read_jobs(
    pids: Iterable[int], *, proc: Path = Path("/proc"), folder: Path | None = None, file: str = ""
) -> dict[str, str]:
    """What is known of the work of these processes; several values of a kind are joined by commas.

    Args:
        pids: processes that compute on one device.
        proc: where processes are looked up.
        folder: the job mapping folder, if there is one.
        file: the device's file in it.
    """
    found: dict[str, set[str]] = {label: set() for label in LABELS}
    if folder is not None:
        found["hpc_job"].update(line.strip() for line in _read(folder / file).splitlines() if line.strip())
    for pid in pids:
        cgroup = _read(proc / str(pid) / "cgroup")
        found["hpc_job"].update(_SLURM.findall(cgroup))
        found["pod_uid"].update(uid.replace("_", "-") for uid in _POD.findall(cgroup))
        for variable in _read(proc / str(pid) / "environ").split("\0"):
            name, _, value = variable.partition("=")
            if name == "RANK" and value.isdecimal():
                found["rank"].add(value)
    return {label: ",".join(sorted(values)) for label, values in found.items()}


def _read(path: Path) -> str:
    """A small file, or nothing: a process may end at any time, and others may not be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
