"""What a cluster is given: valid objects of Kubernetes and of the Prometheus operator, made from the same rules."""

import os
import re
import shutil
import signal
import subprocess
from copy import deepcopy
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1, v1alpha1
from test_loop import wait_for
from test_rules import run
from tools import ROOT, find_tool

from exporter.config import Config, _config, refuse_unsafe
from exporter.files import packaged_files, write_files
from exporter.kubernetes import NAMESPACE
from trainer_plugin.config import read_config

RULES = ROOT / "alert_rules"
KUBERNETES_VERSION = "1.31"
OPERATOR = {"PrometheusRule": v1.PrometheusRule, "PodMonitor": v1.PodMonitor,
            "AlertmanagerConfig": v1alpha1.AlertmanagerConfig}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder for a cluster as `python -m exporter files` writes it."""
    out = tmp_path_factory.mktemp("out")
    write_files(out, packaged_files(runs=Path("runs")))
    return out / "alert_rules" / "kubernetes"


@pytest.fixture(scope="module")
def objects(folder) -> list[dict]:
    """Every object in the resources of the kustomization."""
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    return [each for name in names for each in yaml.safe_load_all((folder / name).read_text())]


def of_kind(objects, kind):
    """The objects of one kind, by name."""
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def test_every_file_is_a_resource(folder):
    """The kustomization names every file beside it, the made ones too."""
    names = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert sorted([*names, "kustomization.yaml"]) == sorted(path.name for path in folder.iterdir())


def test_core_objects_are_valid(objects):
    """Deployment, DaemonSet and the like hold to Kubernetes's own schemas, with no field that these don't know."""
    checked = [each for each in objects if each["kind"] not in OPERATOR]
    assert {each["kind"] for each in checked} >= {"Deployment", "DaemonSet", "Service", "ConfigMap"}
    for each in checked:
        kubernetes_validate.validate(each, KUBERNETES_VERSION, strict=True)


def test_the_operators_objects_are_valid(objects):
    """Rules, monitors and routes hold to the operator's definitions; read and written again, nothing is lost.

    A field that the definitions don't know would be dropped in the reading.
    """
    checked = [each for each in objects if each["kind"] in OPERATOR]
    assert {each["kind"] for each in checked} == set(OPERATOR)
    for each in checked:
        read = OPERATOR[each["kind"]].model_validate(each)
        assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == each


def test_rules_are_those_of_the_files(objects, tmp_path):
    """Every rule is the file's own, with the namespace as one label more on alerts; promtool accepts them."""
    made = of_kind(objects, "PrometheusRule")
    files = yaml.safe_load((RULES / "prometheus.yml").read_text())["rule_files"]
    assert sorted(made) == sorted(f"pretraining-guard-{name.removesuffix('.yml')}" for name in files)
    for name in files:
        groups = made[f"pretraining-guard-{name.removesuffix('.yml')}"]["spec"]["groups"]
        (tmp_path / name).write_text(yaml.safe_dump({"groups": groups}))
        run(find_tool("promtool"), "check", "rules", tmp_path / name)
        for group in groups:
            for rule in group["rules"]:
                assert "alert" not in rule or rule["labels"].pop("namespace") == NAMESPACE
        assert groups == yaml.safe_load((RULES / name).read_text())["groups"]


def test_routes_are_those_of_the_file(objects):
    """Routes, receivers and inhibitions are alertmanager.yml's own, in the operator's words."""
    (made,) = of_kind(objects, "AlertmanagerConfig").values()
    shipped = yaml.safe_load((RULES / "alertmanager.yml").read_text())

    def matchers(lines):
        return [f'{each["name"]}{each["matchType"]}"{each["value"]}"' for each in lines]

    def back(route):
        words = {re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", key): value for key, value in route.items()}
        words |= {"matchers": matchers(words["matchers"])} if "matchers" in words else {}
        return words | ({"routes": [back(each) for each in words["routes"]]} if "routes" in words else {})

    spec = made["spec"]
    assert back(spec["route"]) == shipped["route"]
    assert [each["name"] for each in spec["receivers"]] == [each["name"] for each in shipped["receivers"]]
    for ours, theirs in zip(spec["receivers"], shipped["receivers"], strict=True):
        hooks = [(hook["sendResolved"], hook["maxAlerts"]) for hook in ours.get("webhookConfigs", ())]
        assert hooks == [(hook["send_resolved"], hook["max_alerts"]) for hook in theirs.get("webhook_configs", ())]
    inhibitions = [
        (matchers(each["sourceMatch"]), matchers(each["targetMatch"]), each["equal"]) for each in spec["inhibitRules"]
    ]
    assert inhibitions == [
        (each["source_matchers"], each["target_matchers"], each.get("equal", [])) for each in shipped["inhibit_rules"]
    ]


def test_jobs_have_the_names_that_rules_ask_for(objects):
    """Every `job` that a rule asks for is one that a monitor gives, and the job's run is on its target."""
    asked = set(re.findall(r'up\{job="(\w+)"', "".join(path.read_text() for path in RULES.glob("*.yml"))))
    given = {
        label["replacement"]: endpoint
        for monitor in of_kind(objects, "PodMonitor").values()
        for endpoint in monitor["spec"]["podMetricsEndpoints"]
        for label in endpoint["relabelings"]
        if label["targetLabel"] == "job"
    }
    assert asked
    assert asked <= set(given)
    assert {label["targetLabel"] for label in given["train"]["relabelings"]} == {"job", "run", "rank"}
    assert given["train"]["honorLabels"] is True


def test_each_of_eight_ranks_in_a_pod_is_a_target_of_its_own(objects):
    """One port and one `rank` each, of which only the first port of pod 0 is rank 0; all else is the same."""
    endpoints = deepcopy(of_kind(objects, "PodMonitor")["training"]["spec"]["podMetricsEndpoints"])
    assert [each["port"] for each in endpoints] == ["metrics", *(f"metrics-{number}" for number in range(1, 8))]
    ranks = [each["relabelings"][-1] for each in endpoints]
    assert [one.get("replacement", "$1") for one in ranks] == ["$1", *(f"$1.{number}" for number in range(1, 8))]
    for rank, endpoint in zip(ranks, endpoints, strict=True):
        rank.pop("replacement", None)
        assert {**endpoint, "port": "metrics"} == endpoints[0]


def test_monitors_find_the_pods(objects):
    """A monitor's selector and port are those of the pods of a Deployment or DaemonSet here."""
    pods = {
        name: each["spec"]["template"]
        for kind in ("Deployment", "DaemonSet")
        for name, each in of_kind(objects, kind).items()
    }
    monitors = of_kind(objects, "PodMonitor")
    for monitor, pod in (("receiver", "receiver"), ("gpu", "gpu-exporter")):
        spec = monitors[monitor]["spec"]
        assert spec["selector"]["matchLabels"].items() <= pods[pod]["metadata"]["labels"].items()
        (container,) = pods[pod]["spec"]["containers"]
        assert spec["podMetricsEndpoints"][0]["port"] in [port["name"] for port in container["ports"]]


def test_containers_have_no_more_rights_than_they_need(objects):
    """Not root, no capability, a root that cannot be written, no account of the cluster's."""
    for kind in ("Deployment", "DaemonSet"):
        for each in of_kind(objects, kind).values():
            spec = each["spec"]["template"]["spec"]
            assert spec["automountServiceAccountToken"] is False
            assert spec["securityContext"]["runAsNonRoot"] is True
            for container in spec["containers"]:
                rights = container["securityContext"]
                assert rights["readOnlyRootFilesystem"] is True
                assert rights["allowPrivilegeEscalation"] is False
                assert rights["capabilities"] == {"drop": ["ALL"]}


def test_the_exporters_settings_are_valid(objects):
    """What the ConfigMaps hold is accepted; the receiver is guarded by the token that the routes send."""
    settings = {name: _config(yaml.safe_load(each["data"]["exporter.yaml"]))
                for name, each in of_kind(objects, "ConfigMap").items()}  # fmt: skip
    assert set(settings) == {"receiver", "gpu-exporter"}
    receiver = settings["receiver"]
    assert isinstance(receiver, Config)
    refuse_unsafe(receiver.receiver)
    assert (receiver.gpu, settings["gpu-exporter"].receiver) == ("off", "off")
    (routes,) = of_kind(objects, "AlertmanagerConfig").values()
    hook = routes["spec"]["receivers"][0]["webhookConfigs"][0]
    secret = hook["httpConfig"]["authorization"]["credentials"]
    mounts = of_kind(objects, "Deployment")["receiver"]["spec"]["template"]["spec"]["volumes"]
    assert secret["name"] in [each["secret"]["secretName"] for each in mounts if "secret" in each]
    assert receiver.receiver.bearer_token_file.endswith(secret["key"])


class _Loader(yaml.SafeLoader):
    """Takes a bare `=` for text, as Kubernetes does."""


_Loader.add_constructor("tag:yaml.org,2002:value", _Loader.construct_yaml_str)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
def test_kustomize_builds_it(folder):
    """Kubectl's own kustomize puts every object into the namespace."""
    built = list(yaml.load_all(run("kubectl", "kustomize", folder), _Loader))
    assert len(built) > 10
    assert {each["metadata"]["namespace"] for each in built} == {NAMESPACE}


@pytest.fixture
def slurm(tmp_path):
    """A folder with stand-ins for srun and scontrol, and the environment of a job in it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(
        '#!/bin/bash\necho "$@" >asked\ntrap "exit 0" USR1\n: >ready\nfor _ in {1..300}; do sleep 0.1; done\nexit 7\n'
    )
    (programs / "scontrol").write_text('#!/bin/bash\necho "$@" >requeued\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    return tmp_path, os.environ | {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}


def test_the_slurm_script_hands_the_signal_on(slurm):
    """Asked to end, the training is told, waited for, and started anew; its guard.yaml is valid."""
    folder, environment = slurm
    job = subprocess.Popen(["bash", RULES / "slurm/train.sbatch", "gpt-0"], cwd=folder, env=environment)
    wait_for((folder / "ready").exists)
    job.send_signal(signal.SIGUSR1)

    assert job.wait(20) == 0
    assert (folder / "requeued").read_text() == "requeue 42\n"
    assert (folder / "asked").read_text() == "python train.py --guard gpt-0.guard.yaml\n"
    config = read_config(yaml.safe_load((folder / "gpt-0.guard.yaml").read_text()))
    assert (config.run, config.runs, config.metrics.host) == ("gpt-0", str(folder / "runs"), "0.0.0.0")  # noqa: S104


def test_the_slurm_script_tells_of_a_failure(slurm):
    """A training that fails is not started anew, and its exit code is the job's."""
    folder, environment = slurm
    (folder / "bin/srun").write_text("#!/bin/bash\nexit 3\n")
    done = subprocess.run(["bash", RULES / "slurm/train.sbatch", "gpt-0"], cwd=folder, env=environment, check=False)

    assert done.returncode == 3
    assert not (folder / "requeued").exists()
    told = re.findall(r"^#SBATCH (--[\w-]+)", (RULES / "slurm/train.sbatch").read_text(), re.MULTILINE)
    assert {"--signal", "--requeue", "--open-mode"} <= set(told)
