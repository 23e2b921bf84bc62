"""The report: a run's folder as one page that is true, whole and safe to open."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from curves import signals
from training import adamw_job, spoil_weights

from trainer_plugin.__main__ import cli
from trainer_plugin.detection.detectors import DetectionConfig
from trainer_plugin.detection.monitor import Monitor
from trainer_plugin.report.charts import Charts
from trainer_plugin.report.page import report_page
from trainer_plugin.report.story import _read_trail, read_story
from trainer_plugin.scenes.overview import Overview
from trainer_plugin.scenes.recorder import Start
from trainer_plugin.scenes.step_log import StepLog

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


class Outline(HTMLParser):
    """The tags that are open, what was closed in the wrong order, and every text and address."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.texts, self.addresses, self.tags = [], [], [], [], set()

    def handle_starttag(self, tag, attrs):
        """A tag begins; those that never end are left out."""
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "href", "xlink:href", "action"}]
        if tag not in {"meta", "br", "img", "link", "input"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        """A tag that is its own end."""
        self.tags.add(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "href", "xlink:href", "action"}]

    def handle_endtag(self, tag):
        """A tag ends: it must be the one that was opened last."""
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        """Text between tags."""
        self.texts.append(data)


def outline(page):
    """What a page is made of; it must be well-formed."""
    found = Outline()
    found.feed(page)
    assert found.wrong == []
    assert found.open == []
    return found


def write_run(folder, losses, trail=(), withheld=()):
    """A run's folder as a job with these losses leaves it, one step each, with these lines in its trail."""
    folder.mkdir()
    monitor = Monitor(DetectionConfig())
    log = StepLog(folder, steps=2000, write=lambda job: job())
    overview = Overview(folder, write=lambda job: job())
    for step, loss in enumerate(losses, 1):
        why = "nonfinite" if step in withheld else None
        seen = signals(step, loss, withheld=why, layer_grad_norms={"blocks.0": 1.0 + step % 3, "head": 2.0})
        log.add(seen, *monitor.update(seen), Start(), steps_total=step, branch=0, now=1e9 + step, lr_factor=1.0)
        overview.add(seen, steps_total=step, branch=0)
    overview.save()
    lines = [json.dumps({"schema": 1, "time": 1e9, **entry}) for entry in trail]
    (folder / "incidents.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def incident(**changes):
    """An incident of step 100 that healed at step 160."""
    return {
        "kind": "incident_healed", "id": 1, "class": "bad_sample", "first_step": 100, "detected_step": 100,
        "last_step": 104, "evidence": ["step 100: robust on loss"], "healed": True, "healed_step": 160,
        "opened_total": 100, **changes,
    }  # fmt: skip


def action(**changes):
    """A rollback of that incident."""
    return {
        "kind": "action", "incident": 1, "reason": "loss unrecovered", "action": "rollback", "step": 140,
        "steps_total": 140, "source": "alert", "alert": "TrainLossNotRecovering", "outcome": "done",
        "detail": "to step 90", "to_step": 90, **changes,
    }  # fmt: skip


def test_it_tells_what_happened_and_what_it_cost(tmp_path):
    """Figures are those of the folder: lost steps, loss before and at its worst, who asked for what."""
    losses = [2.0] * 99 + [9.0] * 5 + [2.0] * 196
    folder = write_run(
        tmp_path / "gpt-0", losses, [incident(kind="incident_opened", healed=False), action(), incident()]
    )
    story = read_story(folder, None)
    [told] = story.incidents
    assert told.healed
    assert told.lost_steps == 50
    assert (told.loss_before, told.loss_worst, told.loss_after) == (2.0, 9.0, 2.0)
    text = " ".join(outline(report_page(story, Charts())).texts)
    assert "TrainLossNotRecovering" in text
    assert "50 steps rolled back" in text
    assert "healed at step 160" in text


def test_updates_that_were_withheld_are_what_was_done(tmp_path):
    """An incident that ended with that alone is not one of which nothing was done."""
    folder = write_run(tmp_path / "gpt-0", [2.0] * 300, [incident()], withheld=range(100, 103))
    text = " ".join(outline(report_page(read_story(folder, None), Charts())).texts)
    assert "3 updates withheld" in text
    assert "nothing" not in text.lower()


def test_a_page_of_a_real_run_is_whole_and_needs_nothing_from_elsewhere(make_guard, tmp_path):
    """From a guard that went back: well-formed, one section an incident, no script, nothing that is loaded."""
    job = make_guard(adamw_job(seed=3), checkpoints={"every": 5}, detection={"sustained_steps": 5})
    job.run(20)
    job.step(spoil_weights)
    job.run(24)
    folder = job.guard._parts.folder.path
    job.guard.close()
    assert cli(["report", str(folder), "--out", str(tmp_path / "report.html")]) == 0
    page = outline((tmp_path / "report.html").read_text())
    assert page.tags & {"script", "img", "link", "iframe", "object"} == set()
    assert [address for address in page.addresses if not address.startswith(("#", "data:image/png"))] == []
    assert {"Incident 1: numerical", "Checkpoints"} <= set(page.texts)
    assert any("rollback" in text for text in page.texts)
    assert any(re.match("python -m trainer_plugin replay .*/scenes/step-", text) for text in page.texts)


@pytest.mark.parametrize(
    "hostile",
    ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "$\\frac{1}{", "$\\frac$", "\x00\u202e"],
)
def test_hostile_text_stays_text(tmp_path, hostile):
    """Whatever stands in a file of the run is shown as it is, and is no part of the page."""
    trail = [incident(evidence=[hostile], **{"class": hostile}), action(reason=hostile, alert=hostile, action=hostile)]
    folder = write_run(tmp_path / "gpt-0", [2.0] * 300, trail)
    page = outline(report_page(read_story(folder, None), Charts()))
    assert page.tags & {"script", "img"} == set()
    assert any(hostile.strip("\x00") in text for text in page.texts)


def test_damaged_lines_are_counted_and_the_rest_is_told(tmp_path):
    """Half a line, another schema, wrong types: none of them costs the others."""
    folder = write_run(tmp_path / "gpt-0", [2.0] * 50, [incident(), {"schema": 7}, {"kind": "action", "step": "x"}])
    with (folder / "incidents.jsonl").open("a") as file:
        file.write('{"schema": 1, "kin')
    story = read_story(folder, None)
    assert [one.id for one in story.incidents] == [1]
    assert story.problems == ["incidents.jsonl: 2 lines cannot be read and are left out"]


def test_a_run_with_nothing_in_it_still_has_a_page(tmp_path):
    """No incident, no step yet, losses that are not finite: a page all the same."""
    empty = write_run(tmp_path / "empty", [])
    assert "No incident." in report_page(read_story(empty, None), Charts())
    nan = write_run(tmp_path / "nan", [float("nan")] * 30, [incident(opened_total=1, first_step=1, detected_step=1)])
    assert "<svg" in report_page(read_story(nan, None), Charts())


def test_what_cannot_be_drawn_costs_its_picture_alone(tmp_path):
    """Losses at the end of all numbers, which no axis holds: the page is there, and says so."""
    folder = write_run(tmp_path / "gpt-0", [1e308, -1e308] * 50, [incident(opened_total=50)])
    page = report_page(read_story(folder, None), Charts())
    outline(page)
    assert "The picture could not be drawn" in page
    assert "Incident 1: bad_sample" in page


def test_a_damaged_guard_yaml_costs_the_checkpoints_alone(tmp_path, capsys):
    """A job that was killed, or another version's options: the story is told, and what is missing in it."""
    folder = write_run(tmp_path / "gpt-0", [2.0] * 50, [incident(opened_total=20)])
    (folder / "guard.yaml").write_text("run: [\n")
    assert cli(["report", str(folder)]) == 0
    assert "1 incidents" in capsys.readouterr().out
    page = (folder / "report.html").read_text()
    assert "the checkpoints are not looked at: " in page
    assert "Incident 1: bad_sample" in page


def test_of_a_trail_that_is_too_long_the_newest_is_told(tmp_path):
    """And that older incidents are missing; never that there was none."""
    old = [incident(id=number, opened_total=number) for number in range(1, 50)]
    folder = write_run(tmp_path / "gpt-0", [2.0] * 50, [*old, incident(id=50, opened_total=50)])
    entries, problems = _read_trail(folder / "incidents.jsonl", most_bytes=1000)
    assert [entry["id"] for entry in entries] == list(range(50 - len(entries) + 1, 51))
    assert 0 < len(entries) < 50
    assert problems == ["incidents.jsonl: only its newest 0 MiB are read: older incidents are missing"]


def test_recorder_lines_that_cannot_be_read_are_counted(tmp_path):
    """Damaged ones and another version's; not half a line at the end, which a job may be writing."""
    folder = write_run(tmp_path / "gpt-0", [2.0] * 50)
    path = folder / "recorder.0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[7] = b"\0" * 30 + b"\n"
    lines[9] = lines[9].replace(b'"step":10', b'"step":10,"schema":9')
    path.write_bytes(b"".join(lines)[:-9])
    story = read_story(folder, None)
    assert len(story.steps) == 47
    assert story.problems == ["recorder.0.jsonl: 2 lines cannot be read and are left out"]


class Counted:
    """Charts that count the incidents they were asked for."""

    def __init__(self):
        self.asked = []

    def timeline(self, story):
        """None."""
        return ""

    def incident(self, story, one):
        """A picture."""
        self.asked.append(one.id)
        return "<svg></svg>"

    def layers(self, story, one):
        """None."""
        return ""


def test_a_run_of_a_thousand_incidents_has_a_page_that_can_be_opened(tmp_path):
    """All are told; the newest 40 have pictures, which take half a second each, and the others say why not."""
    folder = write_run(tmp_path / "gpt-0", [2.0] * 50, [incident(id=number) for number in range(1, 1001)])
    charts = Counted()
    page = report_page(read_story(folder, None), charts)
    assert charts.asked == list(range(961, 1001))
    assert page.count("<section ") == 1000
    assert page.count("Only the newest 40 incidents have pictures.") == 960


def test_an_incident_is_weighed_in_its_own_life(tmp_path):
    """A killed job's last steps are counted again by the next: losses before and at worst are those of the latter."""
    folder = write_run(tmp_path / "gpt-0", [1.0] * 200)
    log = StepLog(folder, steps=2000, write=lambda job: job())
    monitor = Monitor(DetectionConfig())
    for step in range(60, 200):
        seen = signals(step, 9.0 if step == 100 else 2.0)
        log.add(seen, *monitor.update(seen), Start(), steps_total=step, branch=1, now=2e9 + step, lr_factor=1.0)
    trail = json.dumps({"schema": 1, **incident(healed=False, kind="incident_opened"), "time": 2e9 + 100})
    (folder / "incidents.jsonl").write_text(trail + "\n")
    [told] = read_story(folder, None).incidents
    assert (told.loss_before, told.loss_worst) == (2.0, 9.0)


def test_what_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    """A folder that is not there, another kind of folder, an output that would hurt the run."""
    run = write_run(tmp_path / "gpt-0", [2.0])
    command = run / "commands" / "new" / "c1.json"
    command.parent.mkdir(parents=True)
    command.write_text("{}")
    for arguments in (
        ["report", str(tmp_path / "nowhere")],
        ["report", str(tmp_path)],
        ["report", str(run), "--out", str(run / "incidents.jsonl")],
        ["report", str(run), "--out", str(command)],
        ["report", str(run), "--out", str(tmp_path / "no" / "x.html")],
    ):
        assert cli(arguments) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert (run / "incidents.jsonl").read_bytes() == b""
    assert command.read_text() == "{}"


@pytest.mark.live
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_browser_shows_it_offline(tmp_path):
    """Headless Chromium without a network renders the page, its pictures have a size, and nothing is asked for."""
    losses = [2.0] * 99 + [9.0] * 5 + [2.0] * 196
    folder = write_run(tmp_path / "gpt-0", losses, [incident(), action()])
    page = report_page(read_story(folder, None), Charts())
    probe = (
        "<script>document.title = [...document.querySelectorAll('svg')].map(s => Math.round("
        "s.getBoundingClientRect().width)).join(',') + '|' + performance.getEntriesByType('resource').length</script>"
    )
    path = tmp_path / "page.html"
    path.write_text(page.replace("</body>", probe + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{path}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout
    widths, resources = re.search(r"<title>([\d,]+)\|(\d+)</title>", shown).groups()
    assert all(int(width) > 500 for width in widths.split(","))
    assert len(widths.split(",")) == 3
    assert resources == "0"
