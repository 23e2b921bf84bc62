"""Reports of jobs that pull, as somebody with the token of one run would send them to reach another."""

import msgspec
import pytest
from test_pull import app, ask, command, report, runs

from exporter.commands import Record
from exporter.runs import RunFolder

__all__ = ["app", "runs"]


@pytest.mark.parametrize("victim", ["../../../near/state", "../../../near/commands/new/c1", "../../reported"])
def test_a_report_removes_no_file_of_another_run(app, runs, victim):
    """An id that leads elsewhere is 400: state and commands of the other run, and the report itself, stay."""
    near = RunFolder(runs, "near")
    (near.path / "state.json").write_text("{}")
    near.inbox.put(command(1, run="near"))
    assert ask(app, "POST", "far", report()).status_code == 200
    forged = msgspec.structs.replace(command(2), id=victim)
    answer = ask(app, "POST", "far", report(Record(command=forged, outcome="done", decided=1.0, at_step=1)))
    assert (answer.status_code, "command id must be" in answer.text) == (400, True)
    assert (near.path / "state.json").exists()
    assert (runs / "far" / "reported.json").exists()
    assert len(near.inbox.waiting()) == 1
