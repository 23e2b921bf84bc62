"""What a replay has found, as `--json` writes it."""

from typing import Any

import msgspec

from trainer_plugin.replay.normal import Surge
from trainer_plugin.replay.samples import Sample


class Measured(msgspec.Struct, kw_only=True):
    """Loss and gradient norms of one step; NaN and None where they are not known."""

    loss: float
    grad_norm: float | None
    layer_grad_norms: dict[str, float] = {}


class Elsewhere(msgspec.Struct, kw_only=True):
    """A batch on weights that it was not trained on, or other data on those of the scene."""

    step: int
    measured: Measured


class Verdict(msgspec.Struct, kw_only=True):
    """Who it was: `kind` is `sample`, `layer`, `weights`, `batch` or `unknown`; `line` says it in words.

    `name` is the sample's id (or its place, from 1 on) or the layer's name.
    """

    kind: str
    name: str
    line: str


class Finding(msgspec.Struct, kw_only=True):
    """All of it.

    `replayed` is None where there was nothing to run. `errors` are how far it is from what was recorded: relative, the
    largest of the layers. `reproduced`: none is above 1e-6. `samples` are ranked; `first_nonfinite` says where a
    forward pass first met a number that is not finite. `same_batch` is that batch on a checkpoint's weights,
    `other_batch` the batch of the step before on the scene's, and `weight_changes` how far the layers have moved since
    that checkpoint.
    """

    scene: str
    run: str
    step: int
    weights_step: int
    incident: int
    class_: str = msgspec.field(name="class")
    factory: str
    torch: dict[str, str]
    recorded: Measured
    normal: Measured
    replayed: Measured | None = None
    errors: dict[str, float] = {}
    reproduced: bool = False
    samples: list[Sample] = []
    nonfinite_weights: list[str] = []
    first_nonfinite: str | None = None
    layer_order: list[str] = []
    earliest_surge: Surge | None = None
    same_batch: Elsewhere | None = None
    other_batch: Elsewhere | None = None
    weight_changes: dict[str, float] = {}
    notes: list[str] = []
    verdict: Verdict | None = None
    schema: int = 1


def as_json(finding: Finding, plain: Any) -> bytes:  # noqa: ANN401 - a function of any value
    """The finding; a number that is not finite is the text `nan`, `inf` or `-inf`."""
    return msgspec.json.format(msgspec.json.encode(plain(msgspec.to_builtins(finding))), indent=1) + b"\n"
