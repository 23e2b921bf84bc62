"""The state of every random generator that training code draws from: Python's, numpy's, torch's, and each GPU's."""

import hashlib
import random
from typing import Any

import numpy as np
import torch

RNG_PARTS = ("python", "numpy", "torch", "cuda")


def rng_state() -> dict[str, Any]:
    """The generators as they are now, as plain values."""
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002 - the global generator is what training code draws from
    return {
        "python": random.getstate(),
        "numpy": {
            "keys": torch.from_numpy(numpy_state[1].astype(np.int64)),
            "position": int(numpy_state[2]),
            "has_gauss": int(numpy_state[3]),
            "gauss": float(numpy_state[4]),
        },
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Bring the generators back to a state; GPUs' only where there are any."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    keys = numpy_state["keys"].numpy().astype(np.uint32)
    np.random.set_state(  # noqa: NPY002
        ("MT19937", keys, numpy_state["position"], numpy_state["has_gauss"], numpy_state["gauss"])
    )
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def seed_generators(seed: int, step: int, rank: int) -> None:
    """Begin all generators anew, in a way that follows from these three alone."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    random.seed(digest)
    np.random.seed(int.from_bytes(digest[:4], "little"))  # noqa: NPY002
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
