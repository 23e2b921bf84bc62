"""Our GPU page held against nvidia-smi, for `make gpu-check`."""

import csv
import io
import subprocess

from fake_nvml import Shown

# What nvidia-smi calls it, our metric, and how far the two may be apart: they are read some seconds after each other.
COMPARED = {
    "temperature.gpu": ("DCGM_FI_DEV_GPU_TEMP", 10.0),
    "temperature.memory": ("DCGM_FI_DEV_MEMORY_TEMP", 10.0),
    "memory.total": (None, 1.0),
    "memory.reserved": ("DCGM_FI_DEV_FB_RESERVED", 64.0),
    "ecc.errors.uncorrected.volatile.total": ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", 0.0),
    "ecc.errors.corrected.volatile.total": ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", 10.0),
    "remapped_rows.uncorrectable": ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", 0.0),
    "remapped_rows.correctable": ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", 0.0),
}
# These move with the load, so they need only be of the same size.
ALIKE = {
    "power.draw": "DCGM_FI_DEV_POWER_USAGE",
    "clocks.sm": "DCGM_FI_DEV_SM_CLOCK",
    "clocks.mem": "DCGM_FI_DEV_MEM_CLOCK",
}
QUERY = ("uuid", "name", "pci.bus_id", *COMPARED, *ALIKE)


def ask() -> str:
    """What nvidia-smi says, as CSV without units."""
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def differences(shown: Shown, told: str) -> list[str]:
    """One line for each thing in which the page and nvidia-smi differ."""
    found = []
    for row in csv.reader(io.StringIO(told), skipinitialspace=True):
        values = dict(zip(QUERY, row, strict=True))
        uuid = values["uuid"]
        labels = (shown.labels("DCGM_FI_DEV_GPU_TEMP", UUID=uuid) or [{}])[0]
        for key, label in (("name", "modelName"), ("pci.bus_id", "pci_bus_id")):
            if labels.get(label) != values[key]:
                found.append(f"{uuid} {label}: {labels.get(label)!r}, nvidia-smi says {values[key]!r}")
        for key, text in values.items():
            if key in COMPARED or key in ALIKE:
                found += _compared(shown, uuid, key, text)
    return found


def _compared(shown: Shown, uuid: str, key: str, text: str) -> list[str]:
    metric, most = COMPARED.get(key, (ALIKE.get(key), None))
    if metric is None:  # The total is that of the three parts.
        parts = [shown.value(f"DCGM_FI_DEV_FB_{part}", UUID=uuid) for part in ("USED", "FREE", "RESERVED")]
        ours = None if None in parts else sum(part for part in parts if part is not None)
    else:
        ours = shown.value(metric, UUID=uuid)
    theirs = float(text) if text.replace(".", "", 1).replace("-", "", 1).isdecimal() else None
    if ours is None or theirs is None:
        # nvidia-smi has no word for some of what NVML's fields tell, and the other way round.
        return [f"{uuid} {key}: {ours}, nvidia-smi says {text}"] if theirs is not None else []
    off = abs(ours - theirs)
    near = off <= most if most is not None else off <= 0.5 * max(ours, theirs)
    return [] if near else [f"{uuid} {key}: {ours}, nvidia-smi says {theirs}"]
