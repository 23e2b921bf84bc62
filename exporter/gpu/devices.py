"""The GPUs and MIG instances that the driver shows now, and the labels by which they are known."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from exporter.gpu.driver import AbsentError, Driver, Handle, LostError

# The driver puts the profile at the end of an instance's name: "NVIDIA A100-SXM4-80GB MIG 3g.40gb".
_PROFILE = re.compile(r"\bMIG (\d+[cg]\.\S+)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One GPU, or one MIG instance of it, whose `parent` is the GPU's handle. `labels` are those of dcgm-exporter."""

    index: int
    uuid: str
    handle: Handle
    labels: dict[str, str]
    parent: Handle = None
    instance: int | None = None
    shared: bool = False

    @property
    def key(self) -> str:
        """What tells it from all others of this host."""
        return self.uuid if self.instance is None else f"{self.uuid}/{self.instance}"


def find_gpu(driver: Driver, index: int, constant_labels: dict[str, str]) -> Device:
    """The GPU at an index, as NVML counts them.

    Raises:
        LostError: it does not answer.
    """
    handle = driver.call("nvmlDeviceGetHandleByIndex", index)
    uuid = driver.words("nvmlDeviceGetUUID", handle)
    pci = driver.call("nvmlDeviceGetPciInfo", handle).busId
    labels = {
        "gpu": str(index),
        "UUID": uuid,
        "pci_bus_id": pci.decode("ascii", "replace") if isinstance(pci, bytes) else pci,
        "device": f"nvidia{index}",
        "modelName": driver.words("nvmlDeviceGetName", handle),
        **constant_labels,
    }
    return Device(index=index, uuid=uuid, handle=handle, labels=labels, shared=_is_shared(driver, handle))


def instances(driver: Driver, gpu: Device) -> Iterator[Device]:
    """The MIG instances of a GPU."""
    if not gpu.shared:
        return
    for place in range(driver.call("nvmlDeviceGetMaxMigDeviceCount", gpu.handle)):
        try:
            handle = driver.call("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, place)
            number = driver.call("nvmlDeviceGetGpuInstanceId", handle)
        except (AbsentError, LostError):  # This place is empty, or the instance is just being removed.
            continue
        labels = {}
        for key, value in gpu.labels.items():
            labels[key] = value
            if key == "modelName":
                labels |= _instance_labels(driver, handle, number)
        yield Device(
            index=gpu.index, uuid=gpu.uuid, handle=handle, labels=labels, parent=gpu.handle, instance=number
        )  # fmt: skip


def _instance_labels(driver: Driver, handle: Handle, number: int) -> dict[str, str]:
    try:
        profile = _PROFILE.search(driver.words("nvmlDeviceGetName", handle))
    except AbsentError:
        profile = None
    return ({"GPU_I_PROFILE": profile[1]} if profile else {}) | {"GPU_I_ID": str(number)}


def _is_shared(driver: Driver, handle: Handle) -> bool:
    try:
        return bool(driver.call("nvmlDeviceGetMigMode", handle)[0])
    except AbsentError:
        return False
