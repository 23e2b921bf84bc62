"""Kept host memory for snapshots: a fixed number of slots, each filled again and again, never while it is read.

Fresh memory is slow (each page is made when it is first touched) and unbounded; what is kept is neither. On a GPU's
host it is pinned, which makes the copy as fast as the bus.
"""

import threading
from dataclasses import replace

import torch
from torch import Tensor

from trainer_plugin.checkpoints.snapshot import Snapshot


class Slot:
    """Memory for one snapshot. `name` says whose it is, None while it holds no whole one; `filled` counts the fills."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.filled = 0
        self.snapshot = Snapshot(tensors={})
        self._memory: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        self._readers = 0

    @property
    def free(self) -> bool:
        """Whether nobody reads it."""
        return self._readers == 0

    @property
    def size_bytes(self) -> int:
        """How much it holds."""
        return sum(tensor.nbytes for tensor in self.snapshot.tensors.values())

    def fill(self, state: Snapshot, name: str) -> None:
        """Copy a state in; on return its tensors may change again. Nobody may be reading the slot.

        Raises:
            RuntimeError: there is no memory.
        """
        self.name = None
        with self._lock:
            self._fit(state.tensors)
            live = list(state.tensors.values())
            if live:
                torch._foreach_copy_(list(self._memory.values()), live, non_blocking=True)
            for device in {tensor.device for tensor in live if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()
            self.snapshot = replace(state, tensors=dict(self._memory))
            self.name = name

    def hold(self) -> None:
        """Begin to read: the snapshot stays as it is until as many have let it go."""
        with self._lock:
            self._readers += 1

    def release(self) -> None:
        """Let it go."""
        with self._lock:
            self._readers -= 1

    def touch(self, shapes: dict[str, Tensor]) -> None:
        """Get memory for tensors like these (on the meta device), ahead of the first fill."""
        with self._lock:
            if self.name is None:
                self._fit(shapes)

    def _fit(self, tensors: dict[str, Tensor]) -> None:
        """Keep the memory that fits, let go what is wanted no more, and get what is missing."""
        kept, self._memory = self._memory, {}
        for name, tensor in tensors.items():
            memory = kept.pop(name, None)
            if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
                pinned = torch.cuda.is_available()
                memory = torch.zeros_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
            self._memory[name] = memory


class Slots:
    """All slots of a run."""

    def __init__(self, number: int) -> None:
        self._slots = [Slot() for _ in range(number)]
        self._fills = 0

    def take(self, state: Snapshot, name: str) -> Slot | None:
        """Copy a state into the free slot with the oldest snapshot, and hold it; None where none is free."""
        slot = min((slot for slot in self._slots if slot.free), key=lambda slot: slot.filled, default=None)
        if slot is not None:
            self._fills += 1
            slot.filled = self._fills
            slot.fill(state, name)
            slot.hold()
        return slot

    def find(self, name: str) -> Snapshot | None:
        """What is still held of a checkpoint; good until the next fill."""
        return next((slot.snapshot for slot in self._slots if slot.name == name), None)

    def touch(self, tensors: dict[str, Tensor]) -> None:
        """Get memory for tensors like these in the background, so that not even the first save waits for it."""
        shapes = {name: tensor.to("meta") for name, tensor in tensors.items()}

        def touch() -> None:
            for slot in self._slots:
                slot.touch(shapes)

        threading.Thread(target=touch, name="checkpoint-memory", daemon=True).start()
