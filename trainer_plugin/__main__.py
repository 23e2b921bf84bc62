"""`python -m trainer_plugin`: the commands around a guarded training job."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from exporter.catalog import ACTIONS
from trainer_plugin.backtest.command import check_targets, read_options, run_backtest, write_result
from trainer_plugin.backtest.notes import printable
from trainer_plugin.checkpoints.inventory import take_inventory
from trainer_plugin.checkpoints.inventory_table import inventory_table
from trainer_plugin.demo.scenarios import SCENARIOS
from trainer_plugin.operator_command import await_record, send_command
from trainer_plugin.report.command import run_report

_DEMO_EXAMPLE = """example:
  python -m trainer_plugin demo --scenario sustained --json demo.json

exit code: 0 done, 1 it did not go as it must, 2 bad usage"""
_BACKTEST_EXAMPLE = """examples:
  python -m trainer_plugin backtest old.csv --plot old.png
  python -m trainer_plugin backtest logs/*.jsonl --config guard.yaml --json found.json
  python -m trainer_plugin backtest old.csv --sweep robust_score=6,8,10 --sweep drift_limit=5,6

A log is a CSV file, JSON lines, a trainer_state.json, Megatron's text, or a TensorBoard event file (or a folder of
one run's). Nothing is healed by it: the log goes on as it was.
exit code: 0 done, 2 bad usage, or a log that cannot be read"""

_CHECKPOINTS_EXAMPLE = """example:
  python -m trainer_plugin checkpoints runs/gpt-0 --verify --json checkpoints.json

Only reads: it may run beside the job, after its death, and on a host without torch.
exit code: 0 done, 1 something is damaged or a rollback has nothing to go to, 2 bad usage"""

_REPORT_EXAMPLE = """example:
  python -m trainer_plugin report runs/gpt-0 --out report.html

Only reads: it may run beside the job, after its death, and on a host without torch.
exit code: 0 done, 2 bad usage"""

_REPLAY_EXAMPLE = """example:
  python -m trainer_plugin replay runs/gpt-0/scenes/step-000003127-001 --factory train:build --json why.json

The factory, by default the one that the scene names, is imported and run: replay scenes of your own runs only.
exit code: 0 the recorded loss and norms came again, 1 they did not, 2 bad usage, or a scene that cannot be used"""

_COMMAND_EXAMPLE = """examples:
  python -m trainer_plugin command runs/gpt-0 rollback --reason "loss is off since the merge"
  python -m trainer_plugin command runs/gpt-0 partial_rollback --layers blocks.3 blocks.4
  python -m trainer_plugin command runs/gpt-0 stop --wait 600

The job obeys at its next step, within its budget; incidents.jsonl in the run folder keeps who asked and what came of
it. Where the job pulls its commands, RUN_DIR is the run's folder at the receiver.
exit code: 0 done, 1 refused, failed or not answered in time, 2 bad usage"""


def cli(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.ERROR, format="%(name)s: %(message)s")
    try:
        commands = {
            "backtest": _backtest, "checkpoints": _checkpoints, "command": _command, "demo": _demo, "report": _report,
            "replay": _replay,
        }  # fmt: skip
        return commands[options.command](options)
    except BrokenPipeError:  # Whoever read what was printed has seen enough.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the interpreter's last flush
        return 1
    except (OSError, ValueError) as error:
        name, reason = getattr(error, "filename", None), getattr(error, "strerror", None)
        what = f"{name}: {reason}" if name and reason else str(error)
        print(f"trainer_plugin: {printable(what)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("trainer_plugin: interrupted", file=sys.stderr)
        return 130


def _demo(options: argparse.Namespace) -> int:
    # Here, because torch takes seconds to import, and the other commands do without it.
    from trainer_plugin.demo.run import run_demo  # noqa: PLC0415
    from trainer_plugin.run_folder import RunInUseError  # noqa: PLC0415

    try:
        return run_demo(
            scenario_name=options.scenario,
            steps=options.steps,
            seed=options.seed,
            out=options.out,
            local_only=options.local_only,
            json_path=options.json,
            config_path=options.config,
            prometheus=options.prometheus,
        )
    except RunInUseError as error:
        raise ValueError(str(error)) from error


def _backtest(options: argparse.Namespace) -> int:
    return run_backtest(
        options.log,
        config_path=options.config,
        sweep=options.sweep,
        json_path=options.json,
        plot_path=options.plot,
    )


def _checkpoints(options: argparse.Namespace) -> int:
    folder: Path = options.run_dir
    own = folder / "guard.yaml"
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such run folder")
    if options.config is None and not own.is_file():
        raise ValueError(f"{folder}: no guard.yaml in it tells where its checkpoints lie: --config FILE wanted")
    config = read_options(options.config or own)
    check_targets(options.json, None, inputs=[own, folder / "state.json", *filter(None, [options.config])])
    # A guard.yaml of the user's own may leave the run's name to the training script.
    run = config.run if options.config is None else folder.resolve().name
    found = take_inventory(folder, run, config.checkpoints, verify=options.verify, tell=_show_progress)
    _show_progress("")
    found.problems, found.notes = list(map(printable, found.problems)), list(map(printable, found.notes))
    print("\n".join(map(printable, inventory_table(found))))
    if options.json is not None:
        write_result(options.json, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return 1 if found.problems or found.rollback_target is None else 0


def _report(options: argparse.Namespace) -> int:
    return run_report(options.run_dir, options.out)


def _replay(options: argparse.Namespace) -> int:
    from trainer_plugin.replay.command import run_replay  # noqa: PLC0415 - with torch

    return run_replay(
        options.scene_dir, factory=options.factory, json_path=options.json, plot_path=options.plot, tell=_show_progress
    )


def _command(options: argparse.Namespace) -> int:
    if not 0.0 <= options.wait < float("inf"):
        raise ValueError(f"--wait: wanted seconds, at least 0, found {options.wait}")
    folder: Path = options.run_dir
    command = send_command(folder, options.action, layers=tuple(options.layers), reason=options.reason)
    if not options.wait:
        print(f"{command.run}: {command.action} is asked for, as command {command.id}")
        return 0
    record = await_record(folder, command, options.wait)
    if record is None:
        print(
            f"trainer_plugin: {command.run}: {command.action} not decided within {options.wait:g} s, and may be yet",
            file=sys.stderr,
        )
        return 1
    answer = f"{command.run}: {command.action} {record.outcome} at step {record.at_step}: {record.detail or '-'}"
    print(printable(answer), file=sys.stdout if record.outcome == "done" else sys.stderr)
    return 0 if record.outcome == "done" else 1


def _show_progress(what: str) -> None:
    """The thing under way, on one line that the next one takes the place of; only for people."""
    if sys.stderr.isatty():
        print(f"\r\033[K{printable(what)}", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_plugin", description="Commands around a guarded training job."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_backtest(commands)
    _add_checkpoints(commands)
    _add_report(commands)
    _add_replay(commands)
    _add_command(commands)
    demo = commands.add_parser(
        "demo",
        help="train a small GPT on real text, break it, and watch it heal",
        description="Train a small GPT on the Python standard library's source, break it on purpose, and watch real "
        "Prometheus and Alertmanager heal it. Leaves a report and everything else in --out.",
        epilog=_DEMO_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    demo.add_argument(
        "--scenario", choices=sorted(SCENARIOS), default="sustained", help="what is broken (default: sustained)"
    )
    demo.add_argument("--steps", type=int, metavar="N", help="training steps (default: the scenario's own)")
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (default: 0)")
    demo.add_argument("--out", type=Path, metavar="DIR", help="a new folder for everything (default: demo-out/...)")
    whose = demo.add_mutually_exclusive_group()
    whose.add_argument("--local-only", action="store_true", help="without Prometheus: the job's own policy acts")
    whose.add_argument(
        "--prometheus", metavar="URL", help="start no servers: those around this one watch the `runs` of --config"
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    demo.add_argument("--config", type=Path, metavar="FILE", help="a guard.yaml over the demo's own options")
    return parser


def _add_backtest(commands: Any) -> None:  # noqa: ANN401 - argparse's own class has no public name
    backtest = commands.add_parser(
        "backtest",
        help="what the detectors would have said on old logs",
        description="Run the job's own detectors and policy over logs of earlier runs: what each detector would have "
        "said, which incidents there were, and what would have been done.",
        epilog=_BACKTEST_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    backtest.add_argument("log", nargs="+", metavar="LOG", help="a log of an earlier run")
    backtest.add_argument("--config", type=Path, metavar="FILE", help="a guard.yaml (default: the defaults)")
    backtest.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2,...",
        help="try each value of an option; several make every combination",
    )
    backtest.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    backtest.add_argument("--plot", type=Path, metavar="FILE", help="draw it, as .png, .svg or .pdf")


def _add_checkpoints(commands: Any) -> None:  # noqa: ANN401 - argparse's own class has no public name
    checkpoints = commands.add_parser(
        "checkpoints",
        help="the checkpoints of a run, and which one a rollback would take",
        description="List the checkpoints and spike scenes of a run: in which tier each is whole, whether it is "
        "proven, and which one a rollback would take, or why not.",
        epilog=_CHECKPOINTS_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    checkpoints.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, such as runs/gpt-0")
    checkpoints.add_argument("--verify", action="store_true", help="hold every byte against its hash; reads them all")
    checkpoints.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    checkpoints.add_argument(
        "--config", type=Path, metavar="FILE", help="the run's guard.yaml, where its folder has none (or has moved)"
    )


def _add_report(commands: Any) -> None:  # noqa: ANN401 - argparse's own class has no public name
    report = commands.add_parser(
        "report",
        help="what happened in a run and what was done about it, as one HTML file",
        description="Write one page that works offline: the run's timeline, a section for each incident with its "
        "class, evidence, remedies and cost, its layers as a heat map, and the checkpoints.",
        epilog=_REPORT_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, such as runs/gpt-0")
    report.add_argument("--out", type=Path, metavar="FILE", help="where to (default: report.html in that folder)")


def _add_replay(commands: Any) -> None:  # noqa: ANN401
    replay = commands.add_parser(
        "replay",
        help="the step of a spike scene run again, and which sample or layer it was",
        description="Run the step of a spike scene again in this process, to its recorded loss and gradient norms, and "
        "ask why: each sample left out, the layers, the same batch on earlier weights, another batch on these.",
        epilog=_REPLAY_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    replay.add_argument("scene_dir", type=Path, metavar="SCENE_DIR", help="a folder in `scenes` of a run's folder")
    replay.add_argument(
        "--factory", default="", metavar="MODULE:FUNCTION", help="builds the model (default: the scene's)"
    )
    for option, what in (("--json", "write everything as JSON"), ("--plot", "draw it, as .png, .svg or .pdf")):
        replay.add_argument(option, type=Path, metavar="FILE", help=what)


def _add_command(commands: Any) -> None:  # noqa: ANN401
    command = commands.add_parser(
        "command",
        help="ask a running job for an action",
        description="Ask a running job for an action, through the same inbox and policy as an alert does, and wait for "
        "what comes of it.",
        epilog=_COMMAND_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, such as runs/gpt-0")
    command.add_argument("action", choices=ACTIONS, metavar="ACTION", help=", ".join(ACTIONS))
    command.add_argument("--reason", default="", metavar="TEXT", help="why, for the trail")
    command.add_argument(
        "--layers", nargs="+", default=[], metavar="LAYER",
        help="what a partial_rollback takes back (default: those that surged)",
    )  # fmt: skip
    command.add_argument(
        "--wait", type=float, default=60.0, metavar="SECONDS", help="how long to wait for the outcome (default: 60)"
    )


if __name__ == "__main__":
    sys.exit(cli(sys.argv[1:]))
