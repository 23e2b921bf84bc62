"""All dashboards, by the names of their files."""

from pathlib import Path

from grafana_dashboards import fleet, gpu, incidents, runbook, training

FOLDER = Path(__file__).parent / "json"
BUILDERS = {
    "training": training.build,
    "incidents": incidents.build,
    "gpu": gpu.build,
    "fleet": fleet.build,
    "runbook": runbook.build,
}


def write_dashboards(folder: Path = FOLDER) -> list[Path]:
    """Build every dashboard and write it as NAME.json; what is not one of them any more is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, build in BUILDERS.items():
        path = folder / f"{name}.json"
        path.write_text(build())
        written.append(path)
    for path in set(folder.glob("*.json")) - set(written):
        path.unlink()
    return written
