"""`backtest`: what the job's detectors and policy would have said and done on old logs."""

import sys
from pathlib import Path
from typing import Any

import msgspec

from trainer_plugin.backtest.judge import PROGRESS_STEPS, Options, judge
from trainer_plugin.backtest.judged import Judged
from trainer_plugin.backtest.logs import read_log
from trainer_plugin.backtest.plot import Plot
from trainer_plugin.backtest.sweep import Combination, combinations, sweep_table, with_values
from trainer_plugin.backtest.table import table
from trainer_plugin.config import Config, read_config


def run_backtest(
    paths: list[str], *, config_path: Path | None, sweep: list[str], json_path: Path | None, plot_path: Path | None
) -> int:
    """Judge every log, print what was found, and write it where asked; the exit code.

    Raises:
        ValueError: an option or a log cannot be used, in one line.
        OSError: a file cannot be read or written.
    """
    config = read_config({} if config_path is None else config_path)
    if plot_path is not None and (sweep or len(paths) > 1):
        raise ValueError("--plot draws one log under one set of options: give one LOG and no --sweep")
    for path in (json_path, plot_path):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"{path}: no such folder to write into")
    if sweep:
        found: Any = {"sweep": _sweep(paths, config, sweep)}
    else:
        plot = Plot() if plot_path is not None else None
        files = [_judge(path, _options(config), plot) for path in paths]
        print("\n\n".join(table(file) for file in files))
        if plot is not None and plot_path is not None:
            plot.draw(files[0], plot_path)
        found = {"files": files}
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 0


def _sweep(paths: list[str], config: Config, asked: list[str]) -> list[Combination]:
    sections = {name: getattr(config, name) for name in ("detection", "actions", "budget", "checkpoints")}
    known = {name: section.__struct_fields__ for name, section in sections.items()}
    plain = msgspec.to_builtins(config)
    # All are read before the first log is: a wrong value must not be found out after minutes.
    made = [(values, read_config(with_values(plain, values))) for values in combinations(asked, known)]
    swept = [
        Combination(values=values, files=[_judge(path, _options(one), None) for path in paths]) for values, one in made
    ]
    print(sweep_table(swept))
    return swept


def _judge(path: str, options: Options, plot: Plot | None) -> Judged:
    def tell(steps: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{path}: {steps} steps", end="", file=sys.stderr, flush=True)

    judged = judge(read_log(path), options, watch=plot.watch if plot is not None else None, tell=tell)
    if judged.steps >= PROGRESS_STEPS and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return judged


def _options(config: Config) -> Options:
    return Options(
        detection=config.detection,
        actions=config.actions,
        budget=config.budget,
        checkpoint_every_steps=config.checkpoints.every,
    )
