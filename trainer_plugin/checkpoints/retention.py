"""What is kept: the options of checkpoints, and which of them belong to the weights of today. Pure: no torch."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from trainer_plugin.checkpoints.manifest import Manifest


class SaveEvery(msgspec.Struct, frozen=True, kw_only=True):
    """How often a tier is written, in steps, and how many checkpoints it keeps."""

    every: int
    keep: int


class CheckpointsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpoints:` of guard.yaml. `every` is in steps; the number kept per tier counts periodic ones.

    `every_shared` is a multiple of `every` for a shared tier that is slow or dear (null: as `every`). `keep_memory` is
    how many snapshots the host keeps in its memory: each is written from there, and the newest can be restored from it.
    `scenes` is how many spike scenes are kept beside them, 0 for none, and `scenes_bytes` how large they may be
    together. A scene has the weights with which its step began (`scene_weights: before`, for which they are copied in
    each step), or, where the step was applied, those that it left (`after`, without that copy); `auto` is `before`
    where the weights are on the host, and `after` on an accelerator.
    """

    local: str = "checkpoints/local"
    shared: str = "checkpoints/shared"
    every: int = 1000
    every_shared: int | None = None
    keep_memory: int = 1
    keep_local: int = 2
    keep_shared: int = 5
    scenes: int = 3
    scenes_bytes: int = 100_000_000_000
    scene_weights: Literal["auto", "before", "after"] = "auto"
    proof_steps: int = 50

    def __post_init__(self) -> None:
        for name in ("every", "keep_memory", "keep_local", "keep_shared"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, found {getattr(self, name)}")
        if self.every_shared is not None and (self.every_shared < 1 or self.every_shared % self.every):
            raise ValueError(f"`every_shared` must be a multiple of `every`, found {self.every_shared}")
        for name in ("scenes", "scenes_bytes", "proof_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be at least 0, found {getattr(self, name)}")
        if Path(self.local).absolute() == Path(self.shared).absolute():
            raise ValueError(f"`local` and `shared` must be two folders, found {self.local!r} twice")

    @property
    def tiers(self) -> dict[str, SaveEvery]:
        """What holds for each tier."""
        return {
            "local": SaveEvery(every=self.every, keep=self.keep_local),
            "shared": SaveEvery(every=self.every_shared or self.every, keep=self.keep_shared),
        }


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


def kept(
    checkpoints: Iterable[Manifest],
    *,
    keep: int,
    live: Callable[[Manifest], bool],
    proven: Callable[[Manifest], bool],
) -> set[str]:
    """The names of those that a tier keeps: the newest of the live branch, and the newest proven one at any age.

    While nothing of the live branch is proven, what it left behind may still be all there is.
    """
    finite = sorted((m for m in checkpoints if m.finite), key=lambda m: (m.step, m.branch))
    of_today = [m for m in finite if live(m)]
    good = [m for m in of_today if proven(m)]
    found = [*of_today[-keep:], *good[-1:]]
    if not good:
        found += [m for m in finite if m not in of_today][-keep:]
    return {m.name for m in found}
