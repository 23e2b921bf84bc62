"""The machine under a demo that has no GPU: a fake driver with its alert on the real way, or the note played."""

import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from exporter.commands import Command, Inbox
from trainer_plugin.faults.driver import CompilerError, FakeDriver, h100s, uuid
from trainer_plugin.policy.attribution import GPU_FAULT

GPUS = 2
# An alert takes 2 to 6 s: a scrape, an evaluation, and a delivery.
LONGEST_WAIT_SECONDS = 60.0
_LOOK_SECONDS = 0.1


def find_driver(folder: Path) -> FakeDriver | None:
    """A fake driver with healthy GPUs, built in `folder`; None where there can be none, which a line says."""
    if find_spec("pynvml") is None:
        missing = "pynvml is not installed"
    else:
        try:
            return FakeDriver(folder, h100s(GPUS))
        except CompilerError as error:
            missing = str(error)
    print(f"no fake driver ({missing}): going on with a note in the place of its alert")
    return None


class FakeMachine:
    """The host of rank 0 with a fake driver. When a GPU fails, the training waits for the alert that this leads to.

    A demo trains 100 steps in the seconds that an alert takes; without the wait the order of the two would be luck.

    Args:
        driver: what Prometheus sees by way of the exporter.
        inbox: of the run.
        tell: prints a line.
        clock: seconds of any clock that never goes back.
        sleep: waits so many seconds.
    """

    def __init__(
        self,
        driver: FakeDriver,
        inbox: Inbox,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._driver = driver
        self._inbox = inbox
        self._tell = tell
        self._clock = clock
        self._sleep = sleep

    def fail(self, gpu: int, xid: int) -> None:
        """Let the driver report an XID, and return once the alert about it is in the inbox, or was waited for."""
        self._driver.fail(gpu, xid)
        began = self._clock()
        most = f"{LONGEST_WAIT_SECONDS:.0f} s at most"
        self._tell(f"XID {xid} on {uuid(gpu)}; the training waits for the alert, {most}: its steps are much faster")
        while not (heard := self._is_told()) and self._clock() - began < LONGEST_WAIT_SECONDS:
            self._sleep(_LOOK_SECONDS)
        came = f"{GPU_FAULT} is in the inbox" if heard else f"no {GPU_FAULT} has come"
        self._tell(f"{came} after {self._clock() - began:.1f} s; the training goes on")

    def _is_told(self) -> bool:
        commands = [*self._inbox.waiting(), *(record.command for record in self._inbox.records())]
        return any(command.alert == GPU_FAULT for command in commands)


class PlayedMachine:
    """The same where there is no driver or no servers: plays what the receiver makes of TrainGpuFault.

    Args:
        run_folder: of the run.
        step: tells the run's step.
    """

    def __init__(self, run_folder: Path, step: Callable[[], int]) -> None:
        self._run_folder = run_folder
        self._step = step

    def fail(self, gpu: int, xid: int) -> None:
        """Put the note into the inbox, in the words of the rule."""
        now, step = time.time(), self._step()
        command = Command(
            id=f"xid{xid}", run=self._run_folder.name, action="note", source="alert", alert=GPU_FAULT, by="demo",
            received=now, starts_at=now, step=step, steps_total=step,
            reason=f"1 of its GPUs report a fault: rank 0 on {uuid(gpu)}, GPU {gpu} of node-1, last XID {xid}.",
        )  # fmt: skip
        Inbox(self._run_folder).put(command)
