"""A finding as text."""

import math

from trainer_plugin.replay.finding import Finding, Measured
from trainer_plugin.replay.samples import Sample

_MOST_SAMPLES = 5
_MOST_LAYERS = 3


def as_text(finding: Finding) -> list[str]:
    """The lines; the verdict first."""
    verdict = finding.verdict
    lines = [verdict.line if verdict is not None else "", ""]
    lines.append(f"step {finding.step} of run {finding.run}, incident {finding.incident} ({finding.class_})")
    lines.append(f"  recorded     {_numbers(finding.recorded)}")
    if finding.replayed is not None:
        errors = ", ".join(f"{name} {error:.1e}" for name, error in finding.errors.items())
        how = "the same" if finding.reproduced else "not the same"
        lines.append(f"  run again    {_numbers(finding.replayed)}: {how}, off by {errors}")
    lines.append(f"  normal       {_numbers(finding.normal)}")
    if finding.other_batch is not None:
        lines.append(
            f"  same weights {_numbers(finding.other_batch.measured)} with the batch of step {finding.other_batch.step}"
        )
    if finding.same_batch is not None:
        lines.append(
            f"  same batch   {_numbers(finding.same_batch.measured)} on the weights of step {finding.same_batch.step}"
        )
    if len(finding.samples) > 1:
        lines += ["", "leave one out, what adds most first:"]
        lines += [_sample_line(sample, len(finding.samples)) for sample in finding.samples[:_MOST_SAMPLES]]
    lines += _layer_lines(finding)
    lines += [f"note: {note}" for note in finding.notes]
    return lines


def _numbers(measured: Measured) -> str:
    norm = measured.grad_norm
    return f"loss {measured.loss:<12.7g} gradient norm {'-' if norm is None else f'{norm:.7g}'}"


def _sample_line(sample: Sample, count: int) -> str:
    norm = sample.grad_norm_without
    named = f"  id {sample.id}" if sample.id is not None else ""
    return (
        f"  sample {sample.index + 1} of {count}: loss {sample.loss:.4g}; without it loss {sample.loss_without:.4g}, "
        f"gradient norm {'-' if norm is None else f'{norm:.4g}'}; adds {sample.adds:.3g} spreads{named}"
    )


def _layer_lines(finding: Finding) -> list[str]:
    lines = []
    if finding.first_nonfinite is not None:
        lines.append(f"first output that is not finite: {finding.first_nonfinite or 'the model itself'}")
    if finding.earliest_surge is not None:
        surge = finding.earliest_surge
        lines.append(f"first surge of a layer: {surge.layer} in step {surge.step}, x {surge.ratio:.3g} of its own past")
    moved = sorted(finding.weight_changes.items(), key=lambda item: -item[1] if math.isfinite(item[1]) else -math.inf)
    if moved:
        told = ", ".join(f"{layer} x {change:.3g}" for layer, change in moved[:_MOST_LAYERS])
        lines.append(f"moved most since the checkpoint before: {told}")
    return ["", *lines] if lines else []
