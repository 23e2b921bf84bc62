"""`python -m trainer_plugin report`: a run's folder as one HTML file."""

from pathlib import Path

from trainer_plugin.backtest.command import read_options, write_result
from trainer_plugin.checkpoints.inventory import Inventory, take_inventory
from trainer_plugin.report.charts import Charts
from trainer_plugin.report.page import report_page
from trainer_plugin.report.story import read_story


def run_report(run_folder: Path, out: Path | None) -> int:
    """Write the report, and say where it is.

    Raises:
        ValueError: it is no run's folder, or matplotlib is missing.
        OSError: a file cannot be read or written.
    """
    target = out if out is not None else run_folder / "report.html"
    if not target.parent.is_dir() or target.is_dir():
        raise ValueError(f"--out {target}: the name of a file wanted, in a folder that is there")
    if target.exists() and target.name != "report.html" and target.resolve().is_relative_to(run_folder.resolve()):
        raise ValueError(f"--out {target}: would overwrite what belongs to the run: give another name")
    charts = Charts()
    inventory, problems = _inventory(run_folder)
    story = read_story(run_folder, inventory)
    story.problems += problems
    write_result(target, report_page(story, charts).encode())
    still_open = sum(not one.healed for one in story.incidents)
    print(f"{target}: {len(story.incidents)} incidents, {still_open} of them open")
    return 0


def _inventory(run_folder: Path) -> tuple[Inventory | None, list[str]]:
    """Which checkpoints there are, where the run's folder tells where they lie, or why that cannot be told."""
    own = run_folder / "guard.yaml"
    if not own.is_file():
        return None, []
    try:
        config = read_options(own)
        return take_inventory(run_folder, config.run, config.checkpoints, verify=False), []
    except (OSError, ValueError) as error:
        return None, [f"the checkpoints are not looked at: {error}"]
