"""Whose work runs on a GPU, from a recorded /proc and from a folder of Slurm's prolog."""

import os

from fake_nvml import FakeDriver, worker_on

from exporter.gpu.jobs import read_jobs
from trainer_plugin.faults.driver import h100s

POD = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"
NOTHING = {"hpc_job": "", "pod_uid": "", "rank": ""}


def process(proc, pid, cgroup="", environ=""):
    """One process of a made-up /proc."""
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "environ").write_text(environ)


def test_slurm_and_rank_come_from_the_process(tmp_path):
    """The job's number is in the control group of its processes, the rank in their environment."""
    process(
        tmp_path, 7, "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n", "A=1\0RANK=3\0LOCAL_RANK=1\0"
    )
    assert read_jobs([7], proc=tmp_path) == {"hpc_job": "4711", "pod_uid": "", "rank": "3"}


def test_a_pods_uid_is_read_in_both_spellings(tmp_path):
    """Systemd writes the uid with underscores, the other driver with dashes."""
    process(tmp_path, 7, f"0::/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-1.scope")
    process(tmp_path, 8, f"11:devices:/kubepods/besteffort/pod{POD}/5a")
    assert read_jobs([7, 8], proc=tmp_path)["pod_uid"] == POD


def test_several_jobs_on_one_gpu_are_one_value(tmp_path):
    """One series a GPU, whoever shares it."""
    process(tmp_path, 7, "/job_2/", "RANK=1\0")
    process(tmp_path, 8, "/job_1/", "RANK=0\0")
    assert read_jobs([7, 8], proc=tmp_path) == {"hpc_job": "1,2", "pod_uid": "", "rank": "0,1"}


def test_what_can_not_be_read_is_not_known(tmp_path):
    """A process that has ended or belongs to others, a missing folder and a rank that is no number tell nothing."""
    process(tmp_path, 7, "0::/user.slice", "RANK=first\0")
    assert read_jobs([7, 8], proc=tmp_path, folder=tmp_path / "none", file="0") == NOTHING


def test_the_folder_of_the_prolog_is_read_like_dcgm_exporters(tmp_path):
    """One file for each GPU index, a job on each line."""
    (tmp_path / "0").write_text("12\n\n13\n")
    assert read_jobs([], proc=tmp_path, folder=tmp_path, file="0")["hpc_job"] == "12,13"


def test_a_rank_that_the_driver_names_is_found(tmp_path):
    """The processes that the driver names are looked up in the real /proc: here, this test as rank 5."""
    driver = FakeDriver(tmp_path, h100s(2))
    driver.environment["RANK"] = "5"
    with worker_on(driver) as worker:
        worker.next()
        driver.change({"1.pids": f"{worker.process.pid} {2**22}"})
        shown = worker.until(lambda shown: shown.labels("gpu_job_info"))
    (labels,) = shown.labels("gpu_job_info")
    assert (labels["gpu"], labels["rank"]) == ("1", "5")
    assert os.getpid() != worker.process.pid
