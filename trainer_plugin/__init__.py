"""The guard inside a training process: `Guard` and its `Config`."""

from trainer_plugin.config import Config
from trainer_plugin.guard import Guard

__all__ = ["Config", "Guard"]
