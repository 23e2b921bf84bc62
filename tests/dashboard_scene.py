"""A run with everything that the dashboards show, and machines beside it: what real servers are given to scrape."""

import json
import math
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any

import msgspec
from msgspec.structs import replace
from simulated_run import INFO, Series, SimulatedRun

from trainer_plugin.config import MetricsConfig
from trainer_plugin.endpoint import Endpoint
from trainer_plugin.metrics import Standing
from trainer_plugin.placement import Placement
from trainer_plugin.run_folder import RunState
from trainer_plugin.signals import LayerReading

LAYERS = ("wte", "blocks.0", "blocks.1", "ln_f")
_READING = LayerReading(
    weight_norm=10.0, update_ratio=1e-3, first_moment_norm=0.1, second_moment_norm=0.2, activation_max=None
)


class TroubledRun(SimulatedRun):
    """A run with layers, a scaler and checkpoints; an incident of it is told by `trouble`."""

    def __init__(self, runs: Path, name: str) -> None:
        self.incident_open = False
        self.lr_factor = 1.0
        super().__init__(runs, name)
        self.folder.save_state(msgspec.json.encode(RunState()))

    def next(self, **changes: Any) -> Any:
        """The next step, with what the layers, the scaler and the loop tell of it."""
        spread = changes.get("grad_norm", 1.0)
        changes = {"amp_loss_scale": 65536.0, "tokens": 1024, "data_wait_seconds": 0.002, **changes}
        norms = {layer: spread * 0.5 * (number + 1) for number, layer in enumerate(LAYERS)}
        return super().next(layer_grad_norms=norms, layers=dict.fromkeys(LAYERS, _READING), **changes)

    def trouble(self, seconds: float) -> Series:
        """A calm time; a bad batch, a surge, a NaN and an overflow; a loss that stays up; the way back; a calm time."""
        add, rate = self.endpoint.page.add, int(self.steps_per_second)
        yield from self.calm(seconds * rate)
        yield self.next(loss=1.5, withheld="spike")
        yield self.next(grad_norm=30.0)
        yield self.next(loss=math.nan, grad_norm=math.nan, withheld="nonfinite")
        yield self.next(amp_loss_scale=32768.0, withheld="amp_overflow")
        self.incident_open = True
        add("train_incidents_total", 1.0, "lr_too_high")
        yield from self.calm(220, loss=3.5, grad_norm=3.0)
        yield from self.calm(2 * rate, loss=3.5, grad_norm=3.0)
        add("train_actions_total", 1.0, "rollback", "alert", "done")
        add("train_rollback_lost_steps_total", float(self.step - self._saved[0]))
        yield self.roll_back
        self.lr_factor = 0.5
        yield from self.calm(seconds * rate)
        self.incident_open = False
        yield from self.calm(rate)

    def _open_endpoint(self, port: int = 0) -> None:
        config = replace(self.config, metrics=MetricsConfig(port=port))
        moments = dict.fromkeys(LAYERS, ("first", "second"))
        self.endpoint = Endpoint(
            config, layers=LAYERS, moments=moments, scaled=True, steps_total=self.steps_total, info=INFO,
            placement=Placement(gpu_uuid="", hostname="node-1"),
        )  # fmt: skip

    def _stand(self) -> None:
        newest = self.step // 100 * 100
        standing = Standing(
            steps_total=self.steps_total, lr_factor=self.lr_factor, clip_max_norm=1.0,
            incident_open=self.incident_open, loop_up=True, rollback_target_step=newest - 100,
            checkpoint_steps=dict.fromkeys(("local", "shared"), newest),
            checkpoint_seconds={"local": 0.2, "shared": 0.9}, scene_step=newest,
        )  # fmt: skip
        self.endpoint.metrics.stand(self.step, standing)


class Machines:
    """A page with two ranks of a run, their GPUs in the classic names of dcgm-exporter, and their host.

    The second rank is slow, its GPU hot and throttled, and it has an XID; both have a little of everything else.

    Args:
        targets: the folder of Prometheus's targets.
        run: the run that is said to run there.
    """

    def __init__(self, targets: Path, run: str) -> None:
        began = monotonic()
        page = lambda: machines_page(run, monotonic() - began).encode()  # noqa: E731 - closes over the beginning

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(page))
        Thread(target=self._server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{self._server.server_port}"
        (targets / "machines.json").write_text(json.dumps([{"targets": [address], "labels": {"job": "machines"}}]))

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()


def machines_page(run: str, seconds: float) -> str:
    """The page so many seconds after the machines were started."""
    lines = ['node_uname_info{nodename="host-a"} 1']
    for name, value in (
        ("node_infiniband_link_downed_total", seconds // 10), ("node_infiniband_symbol_error_total", 20 * seconds),
        ("node_pressure_io_waiting_seconds_total", 0.2 * seconds), ("node_pressure_cpu_waiting_seconds_total", seconds),
    ):  # fmt: skip
        lines.append(f'{name}{{device="mlx5_0"}} {value}')
    for rank in (0, 1):
        slow = bool(rank)
        uuid, of_rank = f'UUID="GPU-{rank}"', f'run="{run}",rank="{rank}"'
        on_gpu = f'{{gpu="{rank}",{uuid},Hostname="host-a",modelName="H100"}}'
        lines.append(f'train_rank_info{{{of_rank},{uuid},Hostname="host-a"}} 1')
        for bound, share in (("0.1", 0.5), ("0.25", 0.9), ("2.5", 1.0), ("+Inf", 1.0)):
            lines.append(f'train_step_seconds_bucket{{{of_rank},le="{bound}"}} {10 * seconds * share}')
        for name, mean in (("train_step_seconds", 0.14 if slow else 0.1), ("train_data_wait_seconds", 0.03 * rank)):
            lines += [f"{name}_count{{{of_rank}}} {10 * seconds}", f"{name}_sum{{{of_rank}}} {10 * seconds * mean}"]
        gauges = {
            "GPU_TEMP": 88 if slow else 64, "POWER_USAGE": 640, "GPU_UTIL": 97, "FB_USED": 70_000, "FB_FREE": 10_000,
            "SM_CLOCK": 1200 if slow else 1980, "NVLINK_BANDWIDTH_TOTAL": 90_000, "ROW_REMAP_FAILURE": 0,
        }  # fmt: skip
        counters = {
            "ECC_DBE_VOL_TOTAL": 0.1 * rank, "ECC_SBE_VOL_TOTAL": 0.1, "UNCORRECTABLE_REMAPPED_ROWS": 0.1 * rank,
            "PCIE_REPLAY_COUNTER": 0.1, "NVLINK_RECOVERY_ERROR_COUNT_TOTAL": 0.1 * rank,
            "NVLINK_REPLAY_ERROR_COUNT_TOTAL": 0.2, "THERMAL_VIOLATION": 4e8 * rank, "POWER_VIOLATION": 1e8,
            "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN_NS": 1e7,
        }  # fmt: skip
        lines += [f"DCGM_FI_DEV_{name}{on_gpu} {value}" for name, value in gauges.items()]
        lines += [f"DCGM_FI_DEV_{name}{on_gpu} {rate * seconds:.0f}" for name, rate in counters.items()]
        lines.append(f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{on_gpu} 0.6")
        events = 1 if slow and seconds > 10 else 0
        lines.append(f'gpu_xid_events_total{{{uuid},xid="79",class="hardware"}} {events}')
    return "\n".join(lines) + "\n"


def _handler(page: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler
