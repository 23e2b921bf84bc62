"""A tier of several ranks: each writes its own parts, and a checkpoint is there when the first rank has all of them.

The tier's folder may be one for all ranks, or one of each host. Every rank writes into a folder of its own beside the
checkpoints; the lowest rank that sees a folder moves the parts together there, and its manifest comes last. A part that
is left behind by a job that was killed is no checkpoint, and is removed at the next start.
"""

import base64
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from trainer_plugin.checkpoints import manifest
from trainer_plugin.checkpoints.assembly import Assembly
from trainer_plugin.checkpoints.joint_plan import plan_of
from trainer_plugin.checkpoints.manifest import METADATA, PLAIN, File, HashedFile, Manifest, plain_name
from trainer_plugin.checkpoints.plain import decode_plain, encode_plain
from trainer_plugin.checkpoints.retention import SaveEvery
from trainer_plugin.checkpoints.shard_files import Reading, Wanted, write_metadata, write_pieces
from trainer_plugin.checkpoints.snapshot import Snapshot
from trainer_plugin.checkpoints.tier import PART, Tier, as_no_state
from trainer_plugin.checkpoints.time_limit import Disk, patience
from trainer_plugin.ranks import Ranks

_log = logging.getLogger(__name__)


class JointTier(Tier):
    """As of one process, and called on all ranks alike: what is written is written by all, or fails on all.

    `wanted` tells which of the stored tensors this rank needs. `whole` is what every rank has its part of.
    """

    slowness = 5.0

    def __init__(
        self,
        name: str,
        folder: Path,
        retention: SaveEvery,
        *,
        ranks: Ranks,
        assembly: Assembly,
        wanted: Wanted,
        run: str | None = None,
        hang_seconds: float = 30.0,
    ) -> None:
        super().__init__(name, folder, retention, run=run)
        self._ranks = ranks
        self._assembly = assembly
        self._wanted = wanted
        self._hang_seconds = hang_seconds
        self._sharers: tuple[int, ...] = (ranks.rank,)
        self._leads = True
        self._leaders: tuple[int, ...] = tuple(range(ranks.size))
        self.one_folder = True
        self._written = "open"  # What was written last: whatever is done about it has that in its key.

    def open(self) -> None:
        """As of one process. Which ranks see one folder is found out by what they see in it."""
        ranks = self._ranks
        disk = Disk(self.name, self._hang_seconds)
        mark = self.folder / f".rank-{ranks.rank}"

        def make() -> None:
            self._open_folder()
            mark.touch()

        def see() -> list[int]:
            return [rank for rank in range(ranks.size) if mark.with_name(f".rank-{rank}").exists()]

        error: OSError | None = None
        try:
            ranks.together(disk.ask, make)
        except OSError as raised:
            error = raised
        everyone = ranks.gather(tuple(sorted({ranks.rank, *(disk.ask_or_none(see) or ())})))
        disk.ask_or_none(partial(mark.unlink, missing_ok=True))
        self._sharers, self._leads = everyone[ranks.rank], min(everyone[ranks.rank]) == ranks.rank
        self._leaders = tuple(sorted({min(sharers) for sharers in everyone}))
        self.one_folder = len(self._leaders) == 1
        ranks.gather(None)  # All marks are off before anything is written.
        here: list[str] = []
        try:
            here = ranks.together(disk.ask, self._find_here)
        except OSError as raised:
            error = error or raised
        # Of a host that has lost its parts, or is a new one, they can be had from the other tier.
        names = set.intersection(*(set(theirs) for theirs in ranks.gather(here)))
        found = {name: known for name, known in self.whole.items() if self.one_folder or name in names}
        self.whole, self.left_alone = ranks.from_first((found, self.left_alone))
        if error is not None:
            raise error

    def _find_here(self) -> list[str]:
        """The checkpoints that this rank sees; the lowest one of a folder looks into them."""
        if self._leads and self._readable:
            self._find()
        return [path.parent.name for path in self.folder.glob(f"step-*/{manifest.NAME}")]

    def write(self, snapshot: Snapshot, draft: Manifest) -> Manifest:
        """As of one process."""

        def part(folder: Path) -> dict[str, Any]:
            own = [piece for piece in snapshot.pieces if self._answers_for(piece.holders)]
            files, known = write_pieces(folder, snapshot, own)
            with HashedFile(folder / self._plain_name) as file:
                file.write(encode_plain(snapshot.plain))
            holders = {name: piece.holders for piece in own for name in files if name.startswith(piece.prefix)}
            files[self._plain_name], holders[self._plain_name] = file.entry, (self._ranks.rank,)
            return {"files": files, "holders": holders, "known": known, "finite": draft.finite}

        size_bytes = sum(tensor.nbytes for tensor in snapshot.tensors.values())
        return self._write_together(draft.name, f"write/{draft.created}", draft, part, size_bytes)

    def take(self, source: Tier, name: str, *, attempt: str = "") -> Manifest:
        """As of one process; `source` may be another one on each rank. `attempt` tells this time from others."""
        here = source.folder / name
        found = manifest.read(here)

        def part(folder: Path) -> dict[str, Any]:
            if found is None:
                raise OSError(f"{here}: no checkpoint")
            if found.ranks != self._ranks.size:
                raise OSError(f"{here}: written by {found.ranks} ranks, not by {self._ranks.size}")
            own = [
                name for name, holders in found.holders.items() if name in found.files and self._answers_for(holders)
            ]
            files = {name: found.files[name] for name in own}
            manifest.copy_files(here, folder, files)
            report = {"files": files, "holders": {name: found.holders[name] for name in own}, "finite": found.finite}
            if self._ranks.first:
                report["metadata"] = base64.b64encode((here / METADATA).read_bytes()).decode()
            return report

        size_bytes = found.total_bytes if found is not None else 0
        return self._write_together(name, f"take/{attempt}", found, part, size_bytes)

    def refuse(self, draft: Manifest, why: str) -> None:
        """This rank leaves a checkpoint out: the others need not wait for it."""
        key = f"{self.name}/{draft.name}/write/{draft.created}"
        self._assembly.report(f"{key}/part", {"error": why})
        if self._ranks.first:
            self._assembly.give(f"{key}/seal", {"error": f"rank 0: {why}"})

    def rotate(self, kept: set[str]) -> None:
        """As of one process; what the first rank keeps, the others keep too."""
        key = f"{self._written}/rotate"
        if self._ranks.first:
            self._assembly.give(key, sorted(kept))
        kept = set(self._assembly.word(key, self._patience(0)))
        for name in [name for name in self.whole if name not in kept]:
            self.whole.pop(name)
        with self._held():
            for folder in self.folder.glob("step-*") if self._leads else ():
                if folder.name not in kept:
                    manifest.remove(folder)

    def faults(self, name: str) -> list[str]:
        """What is wrong with what this rank needs of a checkpoint; the rest is the other ranks' to look at."""
        with self._held():
            folder = self.folder / name
            found = self._read(folder)
            if found is None:
                return [f"{folder}: no checkpoint there"]
            first = [METADATA, self._plain_of(found)]
            missing = [f"{folder}: lacks {file}" for file in first if file not in found.files]
            wrong = missing or manifest.faults(folder, _only(found, first))
            if wrong:
                return wrong
            files = Reading(folder, self._wanted).files
            missing = [f"{folder}: lacks {file}" for file in sorted(files - found.files.keys())]
            return missing or manifest.faults(folder, _only(found, files))

    def read(self, name: str) -> Snapshot:
        """This rank's part of a checkpoint that has just been found without faults."""
        with self._held():
            folder = self.folder / name
            found = self._read(folder)
            with as_no_state(folder):
                reading = Reading(folder, self._wanted)
                plain = decode_plain((folder / self._plain_of(found)).read_bytes())
                places = {name: place for name, place in reading.places.items() if place is not None}
                return Snapshot(tensors=reading.read(), plain=plain, places=places, unknown=reading.unknown)

    # --- Together --------------------------------------------------------------------------------------------------

    def _write_together(
        self,
        name: str,
        how: str,
        draft: Manifest | None,
        make_part: Callable[[Path], dict[str, Any]],
        size_bytes: int,
    ) -> Manifest:
        """Make this rank's part, and a checkpoint of all parts, or of none."""
        key, assembly, seconds = f"{self.name}/{name}/{how}", self._assembly, self._patience(size_bytes)
        folder = self._part_folder(self._ranks.rank, name)
        try:
            try:
                with self._held():
                    shutil.rmtree(folder, ignore_errors=True)
                    if not self._made:
                        self._make()
                    folder.mkdir(mode=0o700)
                    report = make_part(folder)
            except Exception as error:  # noqa: BLE001 - told to all
                report = {"error": str(error) or type(error).__name__}
            assembly.report(f"{key}/part", report)
            if self._ranks.first:
                assembly.give(f"{key}/seal", self._plan(f"{key}/part", draft, seconds))
            plan = assembly.word(f"{key}/seal", 2.0 * seconds)
            _raise_error(plan)
            if self._leads:
                assembly.report(f"{key}/sealed", self._seal(name, plan))
            if self._ranks.first:
                assembly.give(f"{key}/whole", self._verdict(f"{key}/sealed", seconds))
            verdict = assembly.word(f"{key}/whole", 2.0 * seconds)
            if "error" in verdict:
                if self._leads:
                    manifest.discard(self.folder / name)
                _raise_error(verdict)
            self._written = key
            self.whole[name] = msgspec.convert(plan["manifest"], Manifest)
            return self.whole[name]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _plan(self, key: str, draft: Manifest | None, seconds: float) -> dict[str, Any]:
        """On the first rank: what the checkpoint is to be, or why there is none."""
        try:
            parts = self._assembly.collect(key, tuple(range(self._ranks.size)), seconds)
            return plan_of(parts, draft, tier=self.name)
        except Exception as error:  # noqa: BLE001 - told to all
            return {"error": str(error) or type(error).__name__}

    def _seal(self, name: str, plan: dict[str, Any]) -> dict[str, Any]:
        """On the lowest rank of a folder: move the parts together there, and make a checkpoint of them."""
        folder = self.folder / name
        try:
            with self._held():
                self._clear(folder)
                folder.mkdir(mode=0o700)
                files: dict[str, File] = {}
                for rank in self._sharers:
                    own = msgspec.convert(plan["files"][str(rank)], dict[str, File])
                    for file in own:
                        (self._part_folder(rank, name) / file).rename(folder / file)
                    files |= own
                files |= write_metadata(folder, base64.b64decode(plan["metadata"]))
                whole = msgspec.convert(plan["manifest"], Manifest)
                manifest.seal(folder, replace(whole, files=files, partial=not self.one_folder))
        except Exception as error:  # noqa: BLE001 - told to all
            with suppress(OSError):
                manifest.discard(folder)
            return {"error": str(error) or type(error).__name__}
        return {}

    def _verdict(self, key: str, seconds: float) -> dict[str, Any]:
        try:
            sealed = self._assembly.collect(key, self._leaders, seconds)
        except OSError as error:
            return {"error": str(error)}
        return next(({"error": f"rank {rank}: {told['error']}"} for rank, told in sealed.items() if told), {})

    def _answers_for(self, holders: tuple[int, ...]) -> bool:
        """Whether this rank is the one that stores, in the folder that it sees, what these ranks have alike."""
        return min((rank for rank in holders if rank in self._sharers), default=None) == self._ranks.rank

    def _part_folder(self, rank: int, name: str) -> Path:
        return self.folder / f"{PART}{rank}-{name}"

    @property
    def _plain_name(self) -> str:
        return plain_name(self._ranks.rank)

    def _plain_of(self, found: Manifest | None) -> str:
        """The file with this rank's plain values; the first rank's, where other ranks have saved."""
        return self._plain_name if found is not None and found.ranks == self._ranks.size else PLAIN

    def _patience(self, size_bytes: int) -> float:
        return 2.0 * patience(size_bytes, self._hang_seconds)


def _only(found: Manifest, files: "set[str] | list[str]") -> Manifest:
    return replace(found, files={name: found.files[name] for name in files})


def _raise_error(told: dict[str, Any]) -> None:
    if "error" in told:
        raise OSError(told["error"])
