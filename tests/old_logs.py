"""Old logs for the tests of the backtest: one run's values, written in each of the five formats."""

import json
import math
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_tensor_proto

from trainer_plugin.backtest.logs import read_log

# Real logs, numbers only, from public repositories: Apache-2.0, Apache-2.0, MIT.
# mlcommons/training, small_llm_moe_pretraining/primus/rcp_logs/gbs64/run_1.log, steps 800 to 979.
# sail-sg/Adan, NLP/BERT/exp_results/pretrain/hydra_train-adan.log, steps 95000 to 110000.
# openai/parameter-golf, models/Behemoth/8gpu-runs/logs_v8.txt, whole.
REAL = {name: Path(__file__).parent / "excerpts" / f"{name}.csv"
        for name in ("gptoss20b_spike", "bert_base_loss_scale", "pgolf_nan")}  # fmt: skip

# Step, loss, gradient norm, learning rate: floats of 32 bits, which is what an event file keeps.
VALUES = [(10, 2.5, 0.5, 0.25), (20, 2.25, 0.75, 0.125), (30, math.nan, math.inf, 0.125), (40, 2.0, 0.5, 0.0625)]


def read(path):
    """All rows of a log, and the log."""
    log = read_log(path)
    return list(log), log


def write(folder, name, content):
    """A file with this content, text or bytes."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def csv_text(values=VALUES):
    """With names above."""
    return "step,loss,grad_norm,lr\n" + "".join(f"{s},{loss},{norm},{rate}\n" for s, loss, norm, rate in values)


def json_lines_text(values=VALUES):
    """As Python writes it, NaN and Infinity included."""
    names = ("step", "loss", "grad_norm", "learning_rate")
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in values)


def trainer_state_text(values=VALUES):
    """With the entries of an evaluation and of the end among those of steps."""
    names = ("step", "loss", "grad_norm", "learning_rate")
    history = [{"epoch": 0.1, **dict(zip(names, row, strict=True))} for row in values]
    history.insert(2, {"epoch": 0.1, "eval_loss": 2.4, "eval_runtime": 1.0, "step": 20})
    history.append({"epoch": 1.0, "train_loss": 2.3, "train_runtime": 9.0, "total_flos": 1.0, "step": 40})
    return json.dumps({"best_metric": None, "global_step": 40, "log_history": history, "logging_steps": 10}, indent=2)


def megatron_line(step, loss, norm, rate, *, skipped=0, nans=0, prefix=" "):
    """One line as Megatron-LM prints it; a loss of None is not printed."""
    printed = "" if loss is None else f" lm loss: {loss:.6E} |"
    norm_text = "" if norm is None else f" grad norm: {norm:.3f} |"
    return (
        f"{prefix}iteration {step:8d}/     500 | consumed samples: {step * 64:12d} | elapsed time per iteration (ms): "
        f"123.4 | learning rate: {rate:.6E} | global batch size:    64 |{printed} loss scale: 1.0 |{norm_text} number "
        f"of skipped iterations: {skipped:3d} | number of nan iterations: {nans:3d} |\n"
    )


def megatron_text(values=VALUES):
    """Lines of steps, with others before, between and after."""
    lines = [megatron_line(*row) for row in values]
    lines.insert(0, "using world size: 8, data-parallel size: 8, loss: later\n------------------------\n")
    lines.insert(3, " validation loss at iteration 20 | lm loss value: 2.400000E+00 | lm loss PPL: 1.1E+01 |\n")
    return "".join(lines) + "saving checkpoint at iteration      40 to /checkpoints\n"


def scalar(tag, value, *, tensor=False):
    """A summary of one number, in the old form or in the new one."""
    if not tensor:
        return Summary.Value(tag=tag, simple_value=value)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
    return Summary.Value(tag=tag, tensor=make_tensor_proto(value, dtype="float32"), metadata=metadata)


def write_events(folder, summaries, *, suffix=""):
    """An event file with `(step, summary value)`; its path."""
    writer = EventFileWriter(str(folder), filename_suffix=suffix)
    for step, value in summaries:
        writer.add_event(Event(wall_time=1.0, step=step, summary=Summary(value=[value])))
    writer.close()
    return max(folder.glob(f"*tfevents*{suffix}"))


def event_values(values=VALUES, *, tensor=False):
    """What a training job writes: one event for each tag and step."""
    tags = ("train/loss", "train/grad_norm", "train/learning_rate")
    return [(row[0], scalar(tag, value, tensor=tensor))
            for row in values for tag, value in zip(tags, row[1:], strict=True)]  # fmt: skip
