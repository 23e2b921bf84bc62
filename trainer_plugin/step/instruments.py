"""The instruments of a step: probe, layer signals and reader, of one process or of several ranks."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer_plugin.config import Config
from trainer_plugin.learning_rate import LrFactor
from trainer_plugin.ranks import Ranks
from trainer_plugin.step.layer_signals import LayerSignals
from trainer_plugin.step.probe import Probe, plain_name
from trainer_plugin.step.reader import StepReader
from trainer_plugin.step.shared_layers import SharedLayerSignals
from trainer_plugin.step.shared_probe import SharedProbe
from trainer_plugin.step.shared_reader import SharedReader


def make_probe(model: nn.Module, config: Config, ranks: Ranks) -> Probe:
    """What measures. Of several ranks all have to make theirs."""
    observes = config.mode == "observe"
    if ranks.alone:
        return Probe(model, torchs_clip=observes)
    return SharedProbe(model, ranks, torchs_clip=observes)


def make_reader(
    probe: Probe,
    config: Config,
    ranks: Ranks,
    *,
    model: nn.Module,
    optimizers: list[Optimizer],
    learning_rate: LrFactor,
    scaler: Any,  # noqa: ANN401 - a GradScaler of any device
) -> StepReader:
    """What reads each step by the probe."""
    signals: LayerSignals | None = None
    every, modules = config.metrics.layers_every, _modules(model, probe) if config.metrics.activations else {}
    options = {"scaler": scaler, "shielded": config.mode == "auto"}
    if isinstance(probe, SharedProbe):
        shares = {probe.parameters[name]: share for name, share in probe.shares.items()}
        if every:
            signals = SharedLayerSignals(
                probe.layers, optimizers, every=every, modules=modules, ranks=ranks, shares=shares
            )
        return SharedReader(probe, optimizers, learning_rate, layer_signals=signals, **options)
    if every:
        signals = LayerSignals(probe.layers, optimizers, every=every, modules=modules)
    return StepReader(probe, optimizers, learning_rate, layer_signals=signals, **options)


def _modules(model: nn.Module, probe: Probe) -> dict[str, nn.Module]:
    """The module of each layer; torch.compile's wrapper, not what is inside it."""
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if plain_name(name) in probe.layers:
            modules.setdefault(plain_name(name), module)
    return modules
