"""Where a rank runs, in the words of the machine's own metrics: a GPU by its UUID, a host by its name."""

import socket
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """`gpu_uuid` is the one that NVML and dcgm-exporter give (`GPU-...`), empty without an NVIDIA GPU."""

    gpu_uuid: str
    hostname: str


def placement_of(model: nn.Module, gpu_uuid: str | None = None) -> Placement:
    """Where the model's first parameter lies; on the GPU `gpu_uuid` if that is told."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return Placement(gpu_uuid=_gpu_uuid(device) if gpu_uuid is None else gpu_uuid, hostname=socket.gethostname())


def _gpu_uuid(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.cuda is None:
        return ""
    # Older versions of torch do not tell it.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return "" if uuid is None else f"GPU-{str(uuid).removeprefix('GPU-')}"
