"""Where a rank runs, as the machine's own metrics call it."""

import socket

import torch
from torch import nn

from trainer_plugin.placement import _gpu_uuid, placement_of


def test_on_a_cpu_there_is_a_host_and_no_gpu():
    """The host's name is what node_exporter calls `nodename`; without an NVIDIA GPU its UUID is empty."""
    placement = placement_of(nn.Linear(2, 2))
    assert (placement.gpu_uuid, placement.hostname) == ("", socket.gethostname())


def test_a_model_without_parameters_or_on_meta_has_no_gpu():
    """What lies nowhere is on no GPU."""
    assert placement_of(nn.ReLU()).gpu_uuid == ""
    with torch.device("meta"):
        assert placement_of(nn.Linear(2, 2)).gpu_uuid == ""
    assert _gpu_uuid(torch.device("cpu")) == ""


def test_the_gpu_may_be_told(make_guard):
    """A UUID in the options takes the place of what torch says, and is what the page shows."""
    told = "GPU-8f6a0b1c-1111-2222-3333-444444444444"
    assert placement_of(nn.Linear(2, 2), told).gpu_uuid == told
    page = make_guard(metrics={"port": 0, "gpu_uuid": told}).guard.page.render().decode()
    assert f'train_rank_info{{run="tiny",rank="0",UUID="{told}",Hostname="{socket.gethostname()}"}} 1.0\n' in page


def test_the_rank_is_on_the_page(make_guard):
    """Each rank tells where it runs, as one series that its GPU's can be joined to."""
    page = make_guard().guard.page.render().decode()
    assert f'train_rank_info{{run="tiny",rank="0",UUID="",Hostname="{socket.gethostname()}"}} 1.0\n' in page
