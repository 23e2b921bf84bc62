"""`python -m trainer_plugin replay`: a scene run again in a fresh process, and why it was so."""

from collections.abc import Callable
from pathlib import Path

from trainer_plugin.backtest.command import check_targets, write_result
from trainer_plugin.backtest.notes import printable
from trainer_plugin.replay.factory import build
from trainer_plugin.replay.finding import as_json
from trainer_plugin.replay.investigate import investigate
from trainer_plugin.replay.material import read_material
from trainer_plugin.replay.plot import Plot
from trainer_plugin.replay.tell import as_text
from trainer_plugin.scenes.scene import plain_value


def run_replay(
    folder: Path, *, factory: str, json_path: Path | None, plot_path: Path | None, tell: Callable[[str], None]
) -> int:
    """Replay a scene, print what was found, and write it where asked; 0 where the recorded numbers came again, else 1.

    Raises:
        ValueError: the scene, the factory or an option cannot be used; in one line, and nothing has been changed.
        OSError: a file cannot be read or written.
    """
    check_targets(json_path, plot_path, inputs=list(folder.iterdir()) if folder.is_dir() else [])
    plot = Plot() if plot_path is not None else None
    material = read_material(folder)
    name = factory or material.scene.factory
    if not name:
        raise ValueError(
            f"{folder}: the scene names no factory: --factory module:function wanted (or Guard(..., factory=...))"
        )
    finding = investigate(material, build(name), name, tell)
    tell("")
    print("\n".join(map(printable, as_text(finding))))
    if json_path is not None:
        write_result(json_path, as_json(finding, plain_value))
    if plot is not None and plot_path is not None:
        write_result(plot_path, plot.draw(finding, material.scene.steps, plot_path.suffix.lower()))
    return 0 if finding.reproduced else 1
