"""`backtest`: what the job's detectors and policy would have said and done on old logs."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import yaml

from exporter.runs import write_atomically
from trainer_plugin.backtest.judge import MOST_EVENTS, PROGRESS_STEPS, Options, judge
from trainer_plugin.backtest.judged import Judged
from trainer_plugin.backtest.logs import read_log
from trainer_plugin.backtest.notes import printable
from trainer_plugin.backtest.plot import KINDS, Plot
from trainer_plugin.backtest.sweep import Combination, combinations, sweep_table, with_values
from trainer_plugin.backtest.table import table
from trainer_plugin.config import Config, OptionsLoader, read_config

# What YAML's loader raises on what it cannot make a value of.
_NOT_YAML = (yaml.YAMLError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def run_backtest(
    paths: list[str], *, config_path: Path | None, sweep: list[str], json_path: Path | None, plot_path: Path | None
) -> int:
    """Judge every log, print what was found, and write it where asked; the exit code.

    Raises:
        ValueError: an option or a log cannot be used, in one line.
        OSError: a file cannot be read or written.
    """
    for path in paths:
        if not path:
            raise ValueError("LOG: a file's name wanted, found an empty one")
    config = read_options(config_path)
    if plot_path is not None and (sweep or len(paths) > 1):
        raise ValueError("--plot draws one log under one set of options: give one LOG and no --sweep")
    check_targets(json_path, plot_path, inputs=[*map(Path, paths), *([] if config_path is None else [config_path])])
    errors: list[ValueError] = []
    if sweep:
        found: Any = {"sweep": _sweep(paths, config, sweep)}
    else:
        plot = Plot() if plot_path is not None else None
        files, errors = _judge_each(paths, _options(config), plot)
        print("\n\n".join(table(file) for file in files))
        if plot is not None and plot_path is not None:
            write_result(plot_path, plot.draw(files[0], plot_path.suffix.lower()))
        found = {"files": files}
    if json_path is not None:
        write_result(json_path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    for unread in errors:
        print(f"trainer_plugin: {printable(str(unread))}", file=sys.stderr)
    return 2 if errors else 0


def read_options(path: Path | None) -> Config:
    """A guard.yaml, or the defaults.

    Raises:
        ValueError: it is none, in one line.
    """
    try:
        return read_config({} if path is None else path)
    except RecursionError as error:
        raise ValueError(f"{path}: not YAML of options: nested too deeply") from error


def _parse(text: str) -> Any:  # noqa: ANN401 - any value
    """A value as guard.yaml's reader understands it."""
    try:
        return yaml.load(text, Loader=OptionsLoader)  # noqa: S506 - a SafeLoader
    except _NOT_YAML as error:
        raise ValueError(f"a YAML value wanted, found {text[:60]!r}") from error


def check_targets(json_path: Path | None, plot_path: Path | None, *, inputs: list[Path]) -> None:
    """Refuse what cannot be written to, or should not be, before anything is read."""
    if plot_path is not None and plot_path.suffix.lower() not in KINDS:
        raise ValueError(f"--plot {str(plot_path)!r}: a file's name that ends in {', '.join(KINDS)} wanted")
    for option, path in (("--json", json_path), ("--plot", plot_path)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ValueError(f"{path}: no such folder to write into")
        if path.is_dir():
            raise ValueError(f"{option} {str(path)!r}: a file's name wanted, found a folder")
        for other in inputs:
            if path.exists() and other.exists() and path.samefile(other):
                raise ValueError(f"{option} {path}: would overwrite what is read: give another name")
            if other.is_dir() and "tfevents" in path.name and path.resolve().is_relative_to(other.resolve()):
                raise ValueError(f"{option} {path}: would be one of the event files in {other}: give another name")
    if json_path is not None and plot_path is not None and json_path.resolve() == plot_path.resolve():
        raise ValueError(f"--json and --plot both name {json_path}: give each its own")


def write_result(path: Path, content: bytes) -> None:
    """Replace a file whole, where a link leads; a pipe or a device is written to as it is."""
    try:
        if str(path).startswith("/dev/") or (path.exists() and not path.is_file()):
            path.write_bytes(content)
        else:
            write_atomically(path.resolve(), content)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror or error}") from error


def _sweep(paths: list[str], config: Config, asked: list[str]) -> list[Combination]:
    sections = {name: getattr(config, name) for name in ("detection", "actions", "budget", "checkpoints")}
    known = {name: section.__struct_fields__ for name, section in sections.items()}
    plain = msgspec.to_builtins(config)
    # All are read before the first log is: a wrong value must not be found out after minutes.
    made = [(values, read_config(with_values(plain, values))) for values in combinations(asked, known, _parse)]
    # All of them together are held until the end.
    most_events = MOST_EVENTS // len(made)
    swept = [
        Combination(values=values, files=[_judge(path, _options(one), None, most_events) for path in paths])
        for values, one in made
    ]
    print(sweep_table(swept))
    return swept


def _judge_each(paths: list[str], options: Options, plot: Plot | None) -> tuple[list[Judged], list[ValueError]]:
    """The logs that can be read, and what is wrong with the others: a bad one of many costs those nothing."""
    files, errors = [], []
    for path in paths:
        try:
            files.append(_judge(path, options, plot))
        except ValueError as error:
            if len(paths) == 1:
                raise
            errors.append(error)
    return files, errors


def _judge(path: str, options: Options, plot: Plot | None, most_events: int = MOST_EVENTS) -> Judged:
    def tell(steps: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{printable(path)}: {steps} steps", end="", file=sys.stderr, flush=True)

    watch = plot.watch if plot is not None else None
    judged = judge(read_log(path), options, most_events=most_events, watch=watch, tell=tell)
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
