"""The faults that can be injected, and what an engineer wants to be told of each: fixed before anything is measured.

`none` means that no incident is wanted. A fault of a machine is `hardware` only where the machine's own word (an alert
of its driver or its links) comes with a loss or gradient gone wrong: signals alone cannot tell it from others.
"""

from typing import Literal, NamedTuple

Kind = Literal[
    "garbage_text",
    "shuffled_labels",
    "duplicated_document",
    "huge_sample",
    "lr_jump",
    "lr_peak",
    "grad_scale",
    "exploding_layer",
    "fp16_overflow",
    "layer_norm_eps",
    "nan_gradient",
    "amp_collapse",
    "slow_rank",
    "stalled_loader",
    "bit_flip",
    "weight_noise",
    "xid",
    "ecc",
    "network_errors",
]


class Right(NamedTuple):
    """The classes that are right for a fault, and why; several where its signals are different from time to time."""

    classes: tuple[str, ...]
    why: str


_DATA = "the weights are well: the next batch has the usual loss"
_CALM = "the loss is calm: there is nothing to heal, and TrainStraggler or TrainStepTimeJitter tells people"
RIGHT: dict[Kind, Right] = {
    "garbage_text": Right(("bad_sample",), _DATA),
    "shuffled_labels": Right(("bad_sample",), _DATA),
    "duplicated_document": Right(
        ("none",), "one document many times has the loss of that document, which is in the noise; nothing breaks"
    ),
    "huge_sample": Right(("bad_sample",), _DATA),
    "lr_jump": Right(("lr_too_high",), "the rate is seen to rise, and the loss after it"),
    "lr_peak": Right(("lr_too_high",), "the loss climbs, or stays where it was thrown, while the rate is at its peak"),
    "grad_scale": Right(("gradient_explosion",), "the gradient surges over a loss that is as usual"),
    "exploding_layer": Right(("gradient_explosion",), "the gradient surges over a loss that is as usual"),
    "fp16_overflow": Right(("numerical",), "Inf in the gradient"),
    "layer_norm_eps": Right(("numerical",), "0 / 0 in the forward pass"),
    "nan_gradient": Right(("numerical",), "NaN in the gradient of one layer"),
    "amp_collapse": Right(("numerical",), "the loss scale is halved again and again"),
    "slow_rank": Right(("none",), _CALM),
    "stalled_loader": Right(("none",), _CALM),
    "bit_flip": Right(
        ("unknown", "numerical"),
        "without the machine's word nobody can tell; not finite is numerical, and neither data nor rate are to blame",
    ),
    "weight_noise": Right(("unknown",), "weights went wrong, and nothing says by what"),
    "xid": Right(("hardware",), "weights go wrong while the driver reports an XID of the GPU of a rank"),
    "ecc": Right(("hardware",), "a bit flips in a weight while the driver counts an uncorrected ECC error"),
    "network_errors": Right(("hardware",), "weights go wrong while the links of a host make errors"),
}
