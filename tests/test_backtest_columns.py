"""Tests of names and numbers in logs: which column is which, and how numbers are printed."""

import math

import pytest

from trainer_plugin.backtest.cells import number, try_number, whole_step
from trainer_plugin.backtest.columns import choose

# By framework: the names in its log, and which of them are step, loss, gradient norm, learning rate, loss scale.
LOGS = {
    "own": ("step loss grad_norm lr loss_scale", "step loss grad_norm lr loss_scale"),
    "capitals": ("Step Loss Grad_Norm LR Loss_Scale", "Step Loss Grad_Norm LR Loss_Scale"),
    "hugging face": ("epoch grad_norm learning_rate loss step", "step loss grad_norm learning_rate -"),
    "weights & biases": (
        "_step _runtime train/loss train/grad_norm train/learning_rate train/global_step eval/loss",
        "train/global_step train/loss train/grad_norm train/learning_rate -",
    ),
    "wandb step only": ("_step loss _timestamp", "_step loss - - -"),
    "lightning": ("epoch step train_loss_step train_loss_epoch val_loss lr-AdamW", "step train_loss_step - lr-AdamW -"),
    "nemo": ("global_step reduced_train_loss lr grad_norm val_loss", "global_step reduced_train_loss grad_norm lr -"),
    "fairseq": ("epoch update loss ppl num_updates lr gnorm loss_scale", "num_updates loss gnorm lr loss_scale"),
    "composer": (
        "loss/train/total l2_norm/grad/global lr-DecoupledAdamW/group0 trainer/global_step metrics/eval/loss",
        "trainer/global_step loss/train/total l2_norm/grad/global lr-DecoupledAdamW/group0 -",
    ),
    "torchtitan": (
        "step loss_metrics/global_avg_loss loss_metrics/global_max_loss grad_norm lr",
        "step loss_metrics/global_avg_loss grad_norm lr -",
    ),
    "llama-factory": ("current_steps total_steps loss lr epoch", "current_steps loss - lr -"),
    "evaluation only": ("step val_loss eval/loss test_loss validation/loss train/eval_loss", "step - - - -"),
}


@pytest.mark.parametrize("name", LOGS)
def test_names_of_many_frameworks(name):
    """Each framework's names are known, and a loss of an evaluation is never taken."""
    given, wanted = LOGS[name]

    found = choose(given.split())

    chosen = (found.step, found.loss, found.grad_norm, found.learning_rate, found.amp_loss_scale)
    assert [value or "-" for value in chosen] == wanted.split()
    assert not found.guessed


def test_names_of_several_words():
    """Spaces, case and quotes of a name do not matter: Megatron's and OLMo's own."""
    found = choose(["lm loss", "mtp_1 loss", "optim/total grad norm", "Learning Rate", "loss scale"])

    assert (found.loss, found.grad_norm) == ("lm loss", "optim/total grad norm")
    assert (found.learning_rate, found.amp_loss_scale) == ("Learning Rate", "loss scale")
    assert choose(["train/CE loss"]).loss == "train/CE loss"


def test_the_best_of_several_losses_is_told():
    """The plainest name wins whatever the order, and the others are told."""
    for names in (["train/loss", "loss", "lm loss"], ["lm loss", "loss", "train/loss"]):
        found = choose(names)

        assert found.loss == "loss"
        assert found.remarks[0].startswith("the loss is read from `loss`; there too: ")


def test_a_likely_loss_is_taken_and_told():
    """Where no name is the usual one, one that ends in loss is taken, but none of a part or an evaluation."""
    found = choose(["step", "z_loss", "val text loss", "text loss"])

    assert (found.loss, found.guessed) == ("text loss", True)
    assert found.remarks == ("no column is named as a loss usually is: `text loss` is taken for it",)


def test_exports_of_one_series():
    """TensorBoard's Value is the loss if nothing else is there; a run's name before a column's is no matter."""
    assert choose(["Wall time", "Step", "Value"]).loss == "Value"
    assert choose(["Step", "Value", "Metric"]).loss is None

    found = choose(["Step", "pond-1 - train/loss", "pond-1 - train/loss__MIN", "pond-1 - train/loss__MAX"])
    assert (found.step, found.loss, found.remarks) == ("Step", "pond-1 - train/loss", ())


def test_samples_count_as_steps_only_if_nothing_else_does():
    """A log that counts in samples is read, and its user told by which name."""
    assert choose(["samples", "step", "loss"]).step == "step"
    assert choose(["consumed samples", "loss"]).samples == "`consumed samples`"
    assert choose(["samples", "step", "loss"]).samples is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("2.5", 2.5), (" 2.5 ", 2.5), ('"2.5"', 2.5), ("2.5E+00", 2.5), ("inf", math.inf), ("-Infinity", -math.inf),
     ("1,234.5", 1234.5), ("1'234", 1234.0), ("1 234", 1234.0), ("1.4M", 1.4e6), ("93.2K", 93200.0),
     ("1.#INF", math.inf), ("-1.#INF00", -math.inf), (b"2.5", 2.5), (2, 2.0), (2.5, 2.5), ([2.5, 3.5], 2.5)],
)  # fmt: skip
def test_numbers_as_logs_print_them(text, value):
    """Quotes, exponents, thousands and suffixes are understood, as text, bytes or JSON's own."""
    assert number(text) == value


@pytest.mark.parametrize("text", ["nan", "NaN", "NAN", "-nan", b"nan", "1.#QNAN", "-1.#IND"])
def test_nan_in_all_spellings(text):
    """NaN is a number of a log."""
    assert math.isnan(number(text))


@pytest.mark.parametrize("text", ["", " ", "None", "null", "N/A", "-", b"", None])
def test_what_says_that_there_is_none(text):
    """Empty cells and the words for nothing are None, not an error."""
    assert number(text) is None


@pytest.mark.parametrize("text", ["abc", "2.5.1", "1,2", "12,34", "tensor(2.5)", True, {}, [], [[1]]])
def test_what_is_no_number(text):
    """Anything else is refused, and a careful caller gets None."""
    with pytest.raises(ValueError, match="a number wanted"):
        number(text)
    assert try_number(text) is None


def test_decimal_commas_where_a_comma_divides_nothing():
    """In a file of semicolons a comma is a decimal one."""
    assert number("2,345", decimal_comma=True) == 2.345
    assert number("1.234,5", decimal_comma=True) == 1234.5
    assert number("2.5", decimal_comma=True) == 2.5


def test_steps_are_whole_numbers():
    """A step may be printed as a float; one that is negative, broken or endless is none."""
    assert [whole_step(cell) for cell in ("100", "100.0", "1e5", "1,000", b" 7 ", 7, 7.0, "0")] == [
        100, 100, 100_000, 1000, 7, 7, 7, 0]  # fmt: skip
    assert {whole_step(cell) for cell in ("-1", "1.5", "nan", "inf", "", "x", None, True, 1e300, 10**400)} == {None}
