"""One trial: fork from the twin, break, go on under a strategy, and look at the held-out loss on the way."""

import math
import statistics
import tempfile
import time
from collections import Counter

from recovery_plan import FAULTS
from strategies import strategy_of
from twins import look, workbench

from trainer_plugin.demo.gpt import sample_losses


def run_trial(trial, plan, twins, work):
    """The result of a trial, as the line that is kept of it; its files lie below the folder `work` meanwhile.

    `looks` are [steps run since the fork, applied steps, seconds of training, held-out loss over the twin's at as many
    applied steps], `rollbacks` are [steps run, applied steps after it, seconds]; what is not finite is None.
    """
    fork = twins.fork(trial.seed, plan.fork_of(trial.moment))
    curve = twins.curve(trial.seed)
    clean = trial.moment - fork.step
    faults = FAULTS[trial.fault](clean, trial.moment)
    bench = workbench(trial.seed, faults)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        strategy = strategy_of(trial, bench, fork, plan=plan, folder=folder)
        try:
            told = _train(bench, strategy, faults, steps=clean + plan.after, curve=curve)
        finally:
            strategy.close()
    return {**trial._asdict(), "fork": fork.step, "planned": clean + plan.after, **told}


def _train(bench, strategy, faults, *, steps, curve):
    """Train so many steps, or until the strategy gives up."""
    model, optimizer, scheduler = bench.model, bench.optimizer, bench.scheduler
    looks, rollbacks, step_seconds = [], [], []
    every = min(curve)
    looked_at = strategy.applied
    while len(step_seconds) < steps and not strategy.stopping:
        began, step = time.perf_counter(), strategy.step
        batch = strategy.next_batch()
        faults.on_forward(model)
        step_loss = faults.on_losses(sample_losses(model, batch["tokens"])).mean()
        step_loss.backward()
        faults.on_gradients(model)
        faults.before_step(optimizer)
        if strategy.before_optimizer(step_loss):
            optimizer.step()
        faults.after_step(optimizer)
        scheduler.step()
        optimizer.zero_grad()
        strategy.end_step()
        step_seconds.append(time.perf_counter() - began)
        run, applied, seconds = len(step_seconds), strategy.applied, round(sum(step_seconds), 3)
        if strategy.step <= step:
            rollbacks.append([run, applied, seconds])
        if applied % every == 0 and applied != looked_at:
            ratio = look(model) / curve[applied]
            looks.append([run, applied, seconds, round(ratio, 5) if math.isfinite(ratio) else None])
            looked_at = applied
    return {
        "run": len(step_seconds),
        "applied": strategy.applied,
        "looks": looks,
        "rollbacks": rollbacks,
        "actions": dict(Counter(strategy.actions)),
        "stopped": strategy.stopping,
        "step_ms": round(1000.0 * statistics.median(step_seconds), 3),
    }
