"""What is kept: the options of checkpoints, and which of them belong to the weights of today. Pure: no torch."""

from pathlib import Path

import msgspec

from trainer_plugin.manifest import Manifest


class CheckpointsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoints:` of guard.yaml. `every` is in steps; the number kept per tier counts periodic ones.

    `scenes` is how many spike scenes are kept beside them, 0 for none.
    """

    local: str = "checkpoints/local"
    shared: str = "checkpoints/shared"
    every: int = 1000
    keep_local: int = 2
    keep_shared: int = 5
    scenes: int = 3
    proof_steps: int = 50

    def __post_init__(self) -> None:
        for name in ("every", "keep_local", "keep_shared"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, found {getattr(self, name)}")
        for name in ("scenes", "proof_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, found {getattr(self, name)}")
        if Path(self.local).absolute() == Path(self.shared).absolute():
            raise ValueError(f"`local` and `shared` must be two folders, found {self.local!r} twice")


class Lineage(msgspec.Struct, kw_only=True):
    """Which steps belong to the weights of today: `began_at[n]` is the step from which branch n went on.

    A rollback begins a branch. What an earlier branch saved beyond the point where a later one left it is abandoned.
    """

    began_at: list[int] = msgspec.field(default_factory=lambda: [0])

    @property
    def branch(self) -> int:
        """The branch that is being trained."""
        return len(self.began_at) - 1

    def begin(self, step: int) -> None:
        """Go on from a checkpoint at `step` in a new branch."""
        self.began_at.append(step)

    def live(self, checkpoint: Manifest) -> bool:
        """Whether today's weights came through this checkpoint."""
        return all(checkpoint.step <= step for step in self.began_at[checkpoint.branch + 1 :])
