"""docker-compose.yml: valid, careful, no different from what is tested, with command lines that real programs accept.

No engine runs here and no Grafana: what only these can tell (images, mounts as they are, users) is not tested.
"""

import re
import subprocess
import time

import pytest
import yaml
from compose import mounts, on_this_machine, services
from test_loop import wait_for
from tools import NEWEST, ROOT, programs_of

from exporter.config import load, refuse_unsafe
from trainer_plugin.__main__ import _parser
from trainer_plugin.config import read_config
from trainer_plugin.demo.process import Process, free_addresses, local_opener
from trainer_plugin.demo.scenarios import SCENARIOS

RULES = ROOT / "alert_rules"
DASHBOARDS = ROOT / "grafana_dashboards"
OURS = {"secrets", "receiver", "demo"}
# What the shipped configurations call the servers, and what Compose does.
NAMES = {"127.0.0.1:9093": "alertmanager:9093", "127.0.0.1:9402": "receiver:9402",
         "127.0.0.1:9400": "dcgm-exporter:9400", "127.0.0.1:9100": "node-exporter:9100"}  # fmt: skip


@pytest.fixture(scope="module")
def stack():
    """The services as Compose reads them."""
    return services()


def test_images_are_pinned(stack):
    """Every image has a version of its own, and none is the newest of whatever day it is."""
    for name, service in stack.items():
        assert re.search(r":v?\d+\.\d+\.\d+[\w.-]*$", service["image"]), name
        assert ("build" in service) == (name in OURS), name


def test_only_this_machine_reaches_the_ports(stack):
    """Whatever is published is so on loopback; the receiver and the job are not published at all."""
    published = {
        name: [port["host_ip"] for port in service["ports"]] for name, service in stack.items() if "ports" in service
    }
    assert published == {name: ["127.0.0.1"] for name in ("prometheus", "alertmanager", "grafana")}


def test_services_have_no_more_rights_than_they_need(stack):
    """No service is privileged; all but the exporter of GPUs drop every capability and gain none."""
    for name, service in stack.items():
        assert not service.get("privileged"), name
        if name == "dcgm-exporter":
            assert service["cap_add"] == ["SYS_ADMIN"]
            continue
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
    for dockerfile in (ROOT / "exporter/Dockerfile", ROOT / "trainer_plugin/Dockerfile"):
        assert re.findall(r"^USER (.+)$", dockerfile.read_text(), re.MULTILINE) == ["guard"]


def test_secrets_are_files(stack):
    """No environment variable holds a secret, and no file of ours does: they are made at the first start."""
    for name, service in stack.items():
        for key, value in (service.get("environment") or {}).items():
            assert not re.search("PASSWORD|TOKEN|KEY|SECRET", key) or value.startswith("/secrets/"), (name, key)
    assert stack["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/secrets/grafana_admin_password"
    config = load(RULES / "compose/exporter.yaml")
    refuse_unsafe(config.receiver)
    assert config.receiver.bearer_token_file == "/secrets/receiver_token"


def test_the_secrets_are_made_once(stack, tmp_path):
    """The service's own lines make both files, and leave them alone the next time."""
    (code,) = stack["secrets"]["command"]
    code = on_this_machine(code, {"/secrets": tmp_path}, {})
    made = []
    for _ in range(2):
        subprocess.run(["python3", "-c", code], check=True)
        made.append({path.name: path.read_text() for path in tmp_path.iterdir()})

    assert made[0] == made[1]
    assert set(made[0]) == {"receiver_token", "grafana_admin_password"}
    assert min(len(text) for text in made[0].values()) >= 32


def test_every_service_says_whether_it_is_well(stack):
    """A health check for each, but for what ends by itself or has no program to check with."""
    assert {name for name, service in stack.items() if "healthcheck" not in service} == {"secrets", "dcgm-exporter"}
    for name, service in stack.items():
        for needed, how in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if needed == "secrets" else "service_healthy"
            assert how["condition"] == wanted, name


def test_every_mounted_file_exists(stack):
    """Compose would make an empty folder of a file that is not there."""
    for name, service in stack.items():
        for place, path in mounts(service).items():
            assert path.exists(), (name, place)
            assert path.is_file() == bool(re.search(r"\.\w+$", place)), (name, place)


def answers(url):
    """Whether a page is there."""
    try:
        with local_opener.open(url, timeout=1):
            return True
    except OSError:
        return False


def readdressed(node):
    """A configuration with Compose's names in it."""
    if isinstance(node, dict):
        return {key: readdressed(value) for key, value in node.items()}
    if isinstance(node, list):
        return [readdressed(value) for value in node]
    return NAMES.get(node, node) if isinstance(node, str) else node


def test_prometheus_scrapes_and_evaluates_what_is_shipped():
    """Rule files, jobs and relabelling are those of prometheus.yml; only names, paths and intervals are others."""
    shipped, ours = (
        yaml.safe_load((RULES / path).read_text()) for path in ("prometheus.yml", "compose/prometheus.yml")
    )
    rule_files = [path.removeprefix("/etc/prometheus/alert_rules/") for path in ours.pop("rule_files")]
    # The rules for GPUs are loaded as soon as they are there.
    assert [name for name in rule_files if name != "gpu.yml"] == [
        n for n in shipped.pop("rule_files") if n != "gpu.yml"
    ]
    intervals = {"scrape_interval": "5s", "evaluation_interval": "5s"}
    shipped["global"] |= intervals
    jobs = {job["job_name"]: job for job in readdressed(shipped.pop("scrape_configs"))}
    jobs["train"]["file_sd_configs"][0]["files"] = ["/demo/runs/targets/*.json"]
    theirs = {job["job_name"]: job for job in ours.pop("scrape_configs")}
    assert {name: theirs[name] for name in jobs} == jobs
    assert set(theirs) - set(jobs) <= {"gpu", "node"}
    assert ours == readdressed(shipped)


def test_alertmanager_routes_as_is_shipped():
    """Routes, inhibitions and receivers are those of alertmanager.yml, with the receiver's name and token."""
    shipped, ours = (
        yaml.safe_load((RULES / path).read_text()) for path in ("alertmanager.yml", "compose/alertmanager.yml")
    )
    for receiver in shipped["receivers"]:
        for hook in receiver.get("webhook_configs", ()):
            hook["url"] = hook["url"].replace("127.0.0.1", "receiver")
            credentials = {"type": "Bearer", "credentials_file": "/secrets/receiver_token"}
            hook["http_config"] = {"authorization": credentials}
    shipped["templates"] = ["/etc/alertmanager/messages.tmpl"]
    assert ours == shipped


def test_grafana_finds_data_source_and_dashboards(stack):
    """The data source asks Prometheus, as often as it scrapes; the dashboards lie where the provider looks."""
    source = yaml.safe_load((DASHBOARDS / "provisioning/data_source.yml").read_text())["datasources"][0]
    (provider,) = yaml.safe_load((DASHBOARDS / "provisioning/dashboards.yml").read_text())["providers"]
    seen = mounts(stack["grafana"])

    assert source["url"] == "http://prometheus:9090"
    prometheus = yaml.safe_load((RULES / "compose/prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    assert seen[provider["options"]["path"]] == DASHBOARDS / "json"
    home = stack["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (DASHBOARDS / "json" / home.removeprefix("/etc/dashboards/")).is_file()
    for kind, name in (("datasources", "data_source"), ("dashboards", "dashboards")):
        assert seen[f"/etc/grafana/provisioning/{kind}/guard.yml"] == DASHBOARDS / f"provisioning/{name}.yml"


def test_the_demos_command_line_is_valid(stack):
    """The program's own parser takes it, with steps enough, and the run lies where the receiver and Prometheus look."""
    options = _parser().parse_args(stack["demo"]["command"])
    config = read_config(yaml.safe_load((RULES / "compose/guard.yaml").read_text()))

    assert options.steps > SCENARIOS[options.scenario].least_steps
    assert config.runs == load(RULES / "compose/exporter.yaml").runs == "/demo/runs"
    assert config.metrics.advertise == f"demo:{config.metrics.port}"
    assert mounts(stack["demo"])[str(options.config)] == RULES / "compose/guard.yaml"


def test_the_counters_of_gpus_are_well_formed():
    """Each line of the file for dcgm-exporter is a field, its kind and its help; no field comes twice."""
    lines = (RULES / "dcgm_counters.csv").read_text().splitlines()
    fields = [line.split(", ", 2) for line in lines if not line.startswith("#")]
    for field, kind, words in fields:
        assert re.fullmatch(r"DCGM_(FI|EXP)_[A-Z_]+", field)
        assert kind in {"gauge", "counter", "label"}
        assert words
    assert len({field for field, *_ in fields}) == len(fields) > 20


@pytest.mark.live
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["prometheus", "alertmanager", "node-exporter"])
def test_the_real_programs_take_their_command_lines(stack, tmp_path, name):
    """Prometheus, Alertmanager and node_exporter start with the service's own arguments, files and all."""
    service, (address,) = stack[name], free_addresses(1)
    places = {place: str(path) for place, path in mounts(service).items() if path.is_dir()}
    for place, path in mounts(service).items():
        if path.is_file():
            # A copy, whose own paths hold here.
            copy = tmp_path / path.name
            copy.write_text(on_this_machine(path.read_text(), {**places, "/secrets": tmp_path}, {}))
            places[place] = str(copy)
    for place in ("/prometheus", "/alertmanager", "/demo/runs", "/secrets"):
        places.setdefault(place, str(tmp_path))
    (tmp_path / "receiver_token").write_text("t")
    if name == "alertmanager":  # Its template lies beside it.
        config = tmp_path / "alertmanager.yml"
        config.write_text(on_this_machine(config.read_text(), places, {}))
    program = {
        "prometheus": programs_of(NEWEST) / "prometheus",
        "alertmanager": programs_of(NEWEST) / "prometheus-alertmanager",
        "node-exporter": programs_of("compose-trixie") / "prometheus-node-exporter",
    }[name]
    arguments = [on_this_machine(argument, places, {}) for argument in service["command"]]
    command = [str(program), *arguments, f"--web.listen-address={address}"]
    process = Process(name, command, address, tmp_path / "log", program.parent)
    try:
        if name == "node-exporter":
            wait_for(lambda: answers(f"http://{address}/"))
        else:
            process.wait_ready(time.monotonic() + 60)
    finally:
        process.terminate()
        process.end(time.monotonic() + 10)
