"""The reader of several ranks: the same steps on all of them, each reduced exactly once, and heard at one boundary."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from msgspec import structs
from torch import Tensor

from trainer_plugin.ranks import RanksError
from trainer_plugin.signals import Signals
from trainer_plugin.step.probe import Limits
from trainer_plugin.step.reader import StepReader, as_tensor
from trainer_plugin.step.row import Row
from trainer_plugin.step.shared_probe import SharedProbe, Told


class SharedReader(StepReader):
    """As of one process. With the last of the signals that `arrived` has yielded goes what this rank has heard.

    `talks`: the first rank may have something to say at this boundary. `stop_asked`: a rank was asked to stop. Both are
    the same on all ranks.
    """

    _probe: SharedProbe

    def __init__(self, probe: SharedProbe, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - as of one process
        super().__init__(probe, *arguments, **options)
        self.talks = False
        self.stop_asked = False
        self._told = Told()
        self._reductions_before = 0

    def begin(self, told: Told) -> None:
        """The next step is about to be taken; `told` is what goes with it."""
        self._told = told
        self._reductions_before = self._probe.reductions

    def protect(self, limits: Limits, *, step: int) -> None:
        """As of one process, but the step has signals: those of the other ranks.

        Raises:
            RanksError: the ranks have this step behind them already, and this one could not make use of it.
        """
        if self._probe.reductions != self._reductions_before:
            raise RanksError(f"step {step}: all ranks have measured it, but this one could not go on from there")
        self.unscale_again()
        self._pass_on(None, step, limits, (), None)

    def arrived(self, **known: Any) -> Iterator[Signals]:  # noqa: ANN401 - as of one process
        """As of one process; tokens, samples and what is not finite are of all ranks."""
        self.talks = self.stop_asked = False
        for signals in super().arrived(**known):
            heard = self._values.shared if self._values is not None else None
            if heard is None:
                continue
            self.talks |= heard.talks
            self.stop_asked |= heard.stop_asked
            if not heard.losses:  # On no rank it could be read: no signals, as of one process.
                continue
            yield structs.replace(
                signals,
                tokens=heard.tokens or None,
                samples=heard.samples,
                loss_ranks=heard.loss_ranks,
                gradient_ranks=heard.gradient_ranks,
            )

    def _loss(self, loss: object) -> Tensor | None:
        return None if loss is None else as_tensor(loss, self._probe.device)  # A stage of a pipeline may have none.

    def _pass_on(
        self, loss: Tensor | None, step: int, limits: Limits, sample_ids: tuple[str, ...], tokens: int | None
    ) -> None:
        self._told = replace(self._told, tokens=tokens, samples=len(sample_ids))
        super()._pass_on(loss, step, limits, sample_ids, tokens)

    def _readings(self, step: int) -> tuple[tuple[str, ...], Tensor | None]:
        """Their values do not go beside the row: they have to be added up first."""
        (layers, values), self._layers_read = self._layers_read or ((), None), None
        if values is None and self._layer_signals is not None:
            layers, values = self._layer_signals.nothing(step - 1)
        self._told = replace(self._told, readings=values)
        return layers, None

    def _measure(self, loss: Tensor | None, limits: Limits, scale: Tensor | None, beside: list[Tensor]) -> Row:
        self._steps_ended = dict(self._shield.steps_ended)
        again, told = self._is_again, self._told
        row, bad = self._probe.measure(loss, limits, scale=scale, beside=beside, again=again, told=told)
        self._unscaling.share(self._probe.overflow)
        if self._shielded:
            self._shield.arm(bad, row.bad)
        return row

    def _is_due(self) -> bool:
        return len(self._taken) > self._lag_steps  # As long on every rank, whatever one has read already.
