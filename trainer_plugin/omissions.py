"""What a training loop has left out, and would never be told of: said once, a few steps after the start."""

import logging

from torch.optim import Optimizer

from trainer_plugin.parts import Parts

_log = logging.getLogger(__name__)
_SETTLED_STEPS = 3
_STRANGERS_EVERY_STEPS = 100


class Omissions:
    """Looked for at the boundaries of one loop. `scheduled`: it has given its scheduler."""

    def __init__(self, parts: Parts, optimizers: list[Optimizer], *, scheduled: bool) -> None:
        self._parts = parts
        self._optimizers = optimizers
        self._scheduled = scheduled
        self._settled_total = parts.history.steps_total + _SETTLED_STEPS
        self._first_position = parts.data.position if parts.data is not None else 0
        self._strangers_said = False

    def look(self) -> None:
        """One step has been run."""
        parts = self._parts
        steps = parts.history.steps_total - self._settled_total
        if steps == 0:
            self._warn_of_forgotten()
            parts.errors.attempt(parts.checkpoints.prepare, parts.state, step=parts.history.step)
        if steps % _STRANGERS_EVERY_STEPS == 0 and not self._strangers_said:
            self._warn_of_strangers()

    def _warn_of_strangers(self) -> None:
        """Parameters that came after the guard are in no norm, no shield and no checkpoint."""
        known = {id(parameter) for parameter in self._parts.probe.parameters.values()}
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        strangers = sum(id(parameter) not in known for group in groups for parameter in group["params"])
        if strangers:
            self._strangers_said = True
            _log.warning(
                "run %s: the optimizers step %d parameters that were not in the model when the guard was built: they "
                "are not measured, shielded or saved; build the guard after them",
                self._parts.config.run,
                strangers,
            )

    def _warn_of_forgotten(self) -> None:
        parts, run = self._parts, self._parts.config.run
        if parts.reader.measured == 0:
            _log.warning("run %s: before_optimizer is not called: nothing is measured, clipped or shielded", run)
        if parts.data is not None and parts.data.position == self._first_position:
            _log.warning("run %s: next_batch is not called: the data that was given will not go back", run)
        if not self._scheduled and any(
            hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in self._optimizers
        ):
            _log.warning("run %s: a scheduler steps the learning rate and was not given: it will not go back", run)
