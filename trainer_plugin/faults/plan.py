"""The plan of a drill: which faults begin when, how often each fires, and what has fired so far."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Protocol, Self

from trainer_plugin.faults.table import Kind

_ALWAYS = 1 << 62


class RaisesXid(Protocol):
    """A driver that reports XIDs when it is told to: a FakeDriver, or who plays the alert of one."""

    def fail(self, gpu: int, xid: int) -> None:
        """Report an XID of a GPU, and let it be as it is after that one."""
        ...


class CountsEcc(Protocol):
    """A driver that counts ECC errors when it is told to."""

    def count_ecc(self, gpu: int) -> None:
        """Count one more uncorrected error of a GPU."""
        ...


class FailingLinks(Protocol):
    """A host's links that go down when they are told to: FakeLinks, or who plays their alert."""

    def fail(self) -> None:
        """Go down once more."""
        ...


@dataclass(kw_only=True)
class Fault:
    """One fault: when it begins, how often it fires, and at which steps it has fired so far."""

    kind: Kind
    at: int
    steps: int
    times: float = 1.0
    parameter: str | None = None
    bit: int = 0
    seconds: float = 0.0
    tell: Callable[[], None] | None = None
    fired_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (_is_whole(self.at) and _is_whole(self.steps)):
            raise ValueError(f"{self.kind}: at and steps must be whole numbers, found {self.at!r} and {self.steps!r}")
        if not (_is_number(self.times) and _is_number(self.seconds)):
            raise ValueError(
                f"{self.kind}: times and seconds must be numbers, found {self.times!r} and {self.seconds!r}"
            )
        if not _is_name(self.parameter):
            raise ValueError(f"{self.kind}: parameter must be a name, found {self.parameter!r}")
        if not (_is_whole(self.bit) and 0 <= self.bit < 32):
            raise ValueError(f"{self.kind}: bit must be 0 to 31, found {self.bit!r}")
        if self.at < 0 or self.steps < 1:
            raise ValueError(f"{self.kind}: at >= 0 and steps >= 1 wanted, found at={self.at}, steps={self.steps}")
        if not (math.isfinite(self.times) and self.times > 0):
            raise ValueError(f"{self.kind}: times must be finite and above 0, found {self.times}")
        if not (math.isfinite(self.seconds) and self.seconds >= 0):
            raise ValueError(f"{self.kind}: seconds must be finite and 0 or more, found {self.seconds}")


def _is_whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _is_number(number: object) -> bool:
    return isinstance(number, Real) and not isinstance(number, bool)


def _is_name(name: object) -> bool:
    return name is None or isinstance(name, str)


def _method(kind: Kind, machine: object, name: str) -> Callable[..., None]:
    """What a fault of a machine calls; found out when it is planned, not when it fires."""
    found: Callable[..., None] | None = getattr(machine, name, None)
    if not callable(found):
        raise ValueError(f"{kind}: something with a method `{name}` wanted, found {type(machine).__name__}")  # noqa: TRY004
    return found


class Plan:
    """Told of faults one after the other, each with a method of its name; counts the steps and what fires in them."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._steps_run = 0

    def garbage_text(self, *, at: int, steps: int = 1) -> Self:
        """`steps` batches after `at` clean ones are uniform noise."""
        return self._add(Fault(kind="garbage_text", at=at, steps=steps))

    def shuffled_labels(self, *, at: int, steps: int = 1) -> Self:
        """The last tensor of `steps` batches, the labels, is in any order."""
        return self._add(Fault(kind="shuffled_labels", at=at, steps=steps))

    def duplicated_document(self, *, at: int, steps: int = 1) -> Self:
        """`steps` batches hold nothing but their first sample."""
        return self._add(Fault(kind="duplicated_document", at=at, steps=steps))

    def huge_sample(self, *, at: int, times: float = 1000.0, steps: int = 1) -> Self:
        """In `steps` steps the loss of the first sample counts `times`, as one that was summed and not averaged."""
        return self._add(Fault(kind="huge_sample", at=at, times=times, steps=steps))

    def lr_jump(self, *, at: int, times: float, steps: int = 1) -> Self:
        """For `steps` steps after `at` clean ones, the learning rate of every group is `times` as high."""
        return self._add(Fault(kind="lr_jump", at=at, times=times, steps=steps))

    def lr_peak(self, *, times: float) -> Self:
        """From the first step on and for good, the learning rate is `times` as high."""
        return self._add(Fault(kind="lr_peak", at=0, times=times, steps=_ALWAYS))

    def grad_scale(self, *, at: int, times: float, steps: int = 1) -> Self:
        """For `steps` steps after `at` clean ones, every gradient is `times` as large."""
        return self._add(Fault(kind="grad_scale", at=at, times=times, steps=steps))

    def exploding_layer(self, *, at: int, times: float, parameter: str, steps: int = 1) -> Self:
        """The same of the parameters alone whose names begin with `parameter`."""
        return self._add(Fault(kind="exploding_layer", at=at, times=times, steps=steps, parameter=parameter))

    def fp16_overflow(self, *, at: int, steps: int = 1) -> Self:
        """For `steps` steps, gradients go through half precision at a loss scale that is too high for them."""
        return self._add(Fault(kind="fp16_overflow", at=at, steps=steps))

    def layer_norm_eps(self, *, at: int, steps: int = 1) -> Self:
        """For `steps` steps, layer norms have an `eps` of 0, as of 1e-8 in half precision, and meet padding."""
        return self._add(Fault(kind="layer_norm_eps", at=at, steps=steps))

    def nan_gradient(self, *, at: int, steps: int = 1, parameter: str | None = None) -> Self:
        """For `steps` steps after `at` clean ones, one element of a gradient is NaN.

        Args:
            at: clean steps before.
            steps: how often it fires.
            parameter: name of the parameter whose gradient is hit; the first that has a gradient if None.
        """
        return self._add(Fault(kind="nan_gradient", at=at, steps=steps, parameter=parameter))

    def amp_collapse(self, *, at: int, steps: int = 30) -> Self:
        """For `steps` steps the gradients overflow at any loss scale, so that a GradScaler halves it each time."""
        return self._add(Fault(kind="amp_collapse", at=at, steps=steps))

    def slow_rank(self, *, at: int, seconds: float, steps: int = 1) -> Self:
        """Each of `steps` steps takes so many seconds longer."""
        return self._add(Fault(kind="slow_rank", at=at, seconds=seconds, steps=steps))

    def stalled_loader(self, *, at: int, seconds: float, steps: int = 1) -> Self:
        """Each of `steps` batches is so many seconds late."""
        return self._add(Fault(kind="stalled_loader", at=at, seconds=seconds, steps=steps))

    def bit_flip(self, *, at: int, parameter: str | None = None, bit: int = 30) -> Self:
        """After `at` clean steps, one bit of one float32 weight flips; 30 is the highest of the exponent."""
        return self._add(Fault(kind="bit_flip", at=at, steps=1, parameter=parameter, bit=bit))

    def weight_noise(self, *, at: int, times: float, parameter: str | None = None) -> Self:
        """After `at` clean steps, weights get noise of `times` their own deviation; all, or those so called."""
        return self._add(Fault(kind="weight_noise", at=at, steps=1, times=times, parameter=parameter))

    def xid(self, *, at: int, driver: RaisesXid, gpu: int = 0, xid: int = 79) -> Self:
        """After `at` clean steps the driver reports an XID of a GPU; 79 has it fall off the bus."""
        fail = _method("xid", driver, "fail")
        return self._add(Fault(kind="xid", at=at, steps=1, tell=lambda: fail(gpu, xid)))

    def ecc(self, *, at: int, driver: CountsEcc, gpu: int = 0, steps: int = 1) -> Self:
        """In each of `steps` steps after `at` clean ones the driver counts an uncorrected ECC error of a GPU."""
        count_ecc = _method("ecc", driver, "count_ecc")
        return self._add(Fault(kind="ecc", at=at, steps=steps, tell=lambda: count_ecc(gpu)))

    def network_errors(self, *, at: int, links: FailingLinks, steps: int = 1) -> Self:
        """In each of `steps` steps after `at` clean ones a link of the host goes down."""
        return self._add(
            Fault(kind="network_errors", at=at, steps=steps, tell=_method("network_errors", links, "fail"))
        )

    @property
    def steps_run(self) -> int:
        """Optimizer steps seen so far, repeated ones included."""
        return self._steps_run

    @property
    def fired(self) -> dict[str, int]:
        """How often each kind of fault has fired; kinds that were not asked for are absent."""
        counts: dict[str, int] = {}
        for fault in self._faults:
            counts[fault.kind] = counts.get(fault.kind, 0) + len(fault.fired_at)
        return counts

    def first_step(self, kind: Kind) -> int | None:
        """The first step that this kind of fault hit, numbered from 1 on as `steps_run` counts; None if none yet."""
        return min(self._fired_at(kind), default=None)

    def last_step(self, kind: Kind) -> int | None:
        """The last step that this kind of fault hit, numbered from 1 on as `steps_run` counts; None if none yet."""
        return max(self._fired_at(kind), default=None)

    def _add(self, fault: Fault) -> Self:
        self._faults.append(fault)
        return self

    def _fired_at(self, kind: Kind) -> list[int]:
        return [step for fault in self._faults if fault.kind == kind for step in fault.fired_at]

    def _firing(self, kind: Kind) -> list[Fault]:
        """The faults of a kind that fire in the step under way, each once, which is counted for each of them."""
        step = self._steps_run + 1
        firing = [
            fault
            for fault in self._faults
            if fault.kind == kind
            and step > fault.at
            and len(fault.fired_at) < fault.steps
            and step not in fault.fired_at[-1:]
        ]
        for fault in firing:
            fault.fired_at.append(step)
        return firing

    def _at(self, position: int, kind: Kind) -> list[Fault]:
        """The faults of a kind that lie in the data at a position."""
        there = [f for f in self._faults if f.kind == kind and f.at <= position < f.at + f.steps]
        for fault in there:
            fault.fired_at.append(self._steps_run + 1)
        return there
