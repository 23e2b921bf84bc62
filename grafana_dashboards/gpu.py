"""The dashboard of the machines beside a run: each rank's step time against its GPU, the links and its host.

Reads the normalised `gpu:*`, `host:*` and `rank:*` records of gpu.yml alone, whichever exporter tells of the GPUs.
"""

from grafana_dashboards.assembly import assemble, run_variable, variable
from grafana_dashboards.panels import Part, lines, number, section, states
from grafana_dashboards.queries import RUN, Query

_RANKS = f'{RUN}, rank=~"$rank"'
# Where the run's ranks are, as the job itself says; over 10 minutes, as it may have died of what is shown here.
_PLACES = f"max by ({{by}}) (last_over_time(train_rank_info{{{{{_RANKS}}}}}[10m]))"
_GPUS = _PLACES.format(by="rank, Hostname, UUID")
_OF_RUN = _PLACES.format(by="UUID")
_HOSTS = _PLACES.format(by="Hostname")
_GPU = "rank {{rank}} on {{Hostname}}"
_HOST = "{{Hostname}}"


def build() -> str:
    """The dashboard's JSON."""
    return assemble(
        "guard-gpu",
        "GPU and network beside the run",
        "One run: the step time of its ranks against clocks, heat, faults and links of the machines that they run on.",
        [
            *_now(),
            section("Ranks"),
            *_ranks(),
            section("GPUs"),
            *_gpus(),
            section("Faults"),
            *_faults(),
            section("Network and hosts"),
            *_hosts(),
        ],
        variables=[
            run_variable(),
            variable("rank", "Rank", f"label_values(train_step_seconds_count{{{RUN}}}, rank)", several=True),
        ],
    )


def _of_gpu(record: str) -> str:
    """A record of each GPU, by the rank that runs on it: one line, however often its exporter changed its labels."""
    return f"{_GPUS} * on (UUID) group_left () {record}"


def _where(record: str) -> str:
    """The same where it is not 0: of hundreds of GPUs only those with something to tell."""
    return f"{_of_gpu(record)} > 0"


def _of_host(record: str) -> str:
    return f"{_HOSTS} * on (Hostname) group_left () {record}"


def _how_many(record: str) -> str:
    """Of the run's GPUs, those of which the record is above 0; 0 where none is, nothing where no GPU is known."""
    return f"count({_OF_RUN} and on (UUID) {record} > 0) or 0 * count({_OF_RUN} and on (UUID) gpu:device:info)"


def _now() -> list[Part]:
    return [
        number("Ranks", "That show their step time.", f"count(rank:step_seconds:mean2m{{{_RANKS}}})"),
        number("GPUs", "Of these ranks, that an exporter tells of.", f"count({_OF_RUN} and on (UUID) gpu:device:info)"),
        number(
            "Faulty GPUs",
            "With an XID of the hardware, uncorrected ECC errors, rows that cannot be remapped, or lost.",
            _how_many("gpu:faulty:max"),
            limits=[1],
            alerts=["TrainGpuFault"],
        ),
        number(
            "Throttled GPUs",
            "Whose clocks were held back by heat or a power brake for more than 5 % of the last 2 minutes.",
            _how_many("gpu:throttled:max"),
            limits=[1],
            alerts=["TrainGpuThrottled"],
        ),
        number("Hottest GPU", "Of this run.", f"max({_of_gpu('gpu:temperature:celsius')})", unit="celsius"),
        number(
            "Stragglers",
            "Ranks that hold up the others: by their own wait for data, their GPU's clock, or their step time.",
            f"count(rank:straggling:max{{{_RANKS}}}) or 0 * count(rank:step_seconds:mean2m{{{_RANKS}}})",
            limits=[1],
            alerts=["TrainStraggler"],
        ),
    ]


def _ranks() -> list[Part]:
    return [
        lines(
            "Step time by rank",
            "Means over 2 minutes. Ranks that wait for each other all take as long as the slowest.",
            Query(expr=f"max by (rank) (rank:step_seconds:mean2m{{{_RANKS}}})", legend="rank {{rank}}"),
            unit="s",
            width=8,
            least=0,
            alerts=["TrainStraggler"],
        ),
        lines(
            "Wait for data by rank",
            "What a rank waits for by itself tells who holds up the others.",
            Query(expr=f"max by (rank) (rank:data_wait_seconds:mean2m{{{_RANKS}}})", legend="rank {{rank}}"),
            unit="s",
            width=8,
            least=0,
            alerts=["TrainStraggler"],
        ),
        lines(
            "Jitter of the step time",
            "The slowest twentieth of 5 minutes' steps over their median.",
            Query(expr=f"max by (rank) (rank:step_seconds_spread:ratio5m{{{_RANKS}}})", legend="rank {{rank}}"),
            unit="none",
            width=8,
            least=0,
            limits=[4],
            alerts=["TrainStepTimeJitter"],
        ),
    ]


def _gpus() -> list[Part]:
    return [
        lines(
            "SM clock",
            "Means over 2 minutes; one that falls below the others slows down all of them.",
            Query(expr=_of_gpu("gpu:sm_clock_hertz:avg2m"), legend=_GPU),
            unit="hertz",
            width=8,
            alerts=["TrainGpuThrottled", "TrainStraggler"],
        ),
        lines(
            "Temperature",
            "Of the GPU. Where clocks are held back by it, the panel of throttling says so.",
            Query(expr=_of_gpu("gpu:temperature:celsius"), legend=_GPU),
            unit="celsius",
            width=8,
            alerts=["TrainGpuThrottled"],
        ),
        lines(
            "Throttled",
            "The part of 2 minutes in which clocks were held back by heat or a power brake (and, thin, by the power "
            "cap, which is everyday life at full load).",
            Query(expr=_where("gpu:throttled_thermal:ratio_rate2m"), legend=f"heat, {_GPU}", color="red"),
            Query(expr=_where("gpu:throttled_power_brake:ratio_rate2m"), legend=f"brake, {_GPU}", color="purple"),
            Query(
                expr=_where("gpu:throttled_power_cap:ratio_rate2m"), legend=f"cap, {_GPU}", color="blue", style="thin"
            ),
            unit="percentunit",
            width=8,
            least=0,
            limits=[0.05],
            alerts=["TrainGpuThrottled"],
        ),
        lines(
            "Power", "Of the board.", Query(expr=_of_gpu("gpu:power:watts"), legend=_GPU), unit="watt", width=8, least=0
        ),
        lines(
            "Utilization",
            "The part of time in which the GPU ran anything, and in which its tensor cores did (if told).",
            Query(expr=_of_gpu("gpu:utilization:ratio"), legend=_GPU),
            Query(expr=_of_gpu("gpu:tensor_active:ratio"), legend=f"tensor, {_GPU}", style="dashed"),
            unit="percentunit",
            width=8,
            least=0,
        ),
        lines(
            "Memory used",
            "Of all instances of the GPU together.",
            Query(expr=_of_gpu("sum by (UUID) (gpu:memory_used:bytes)"), legend=_GPU),
            unit="bytes",
            width=8,
            least=0,
        ),
    ]


def _faults() -> list[Part]:
    return [
        states(
            "Faulty GPUs",
            "An XID of the hardware or NVLink, an uncorrected ECC error, rows remapped or not to be remapped, a GPU "
            "that is lost or wants to be reset.",
            Query(
                expr=f"clamp_max({_of_gpu('gpu:faulty:max')}, 1) or 0 * ({_GPUS} and on (UUID) gpu:device:info)",
                legend=_GPU,
            ),
            words={0: ("no", "green"), 1: ("faulty", "red")},
            width=8,
            alerts=["TrainGpuFault"],
        ),
        lines(
            "XID, ECC and row remaps",
            "In 5 minutes. Corrected errors alone are no fault. Empty is good.",
            Query(expr=_where("gpu:xid_faults:increase5m"), legend=f"XID, {_GPU}", color="red"),
            Query(expr=_where("gpu:ecc_uncorrected:increase5m"), legend=f"uncorrected, {_GPU}", color="orange"),
            Query(expr=_where("gpu:rows_remapped:increase5m"), legend=f"rows remapped, {_GPU}", color="purple"),
            Query(expr=_where("gpu:ecc_corrected:increase5m"), legend=f"corrected, {_GPU}", color="blue", style="thin"),
            unit="none",
            width=8,
            least=0,
            alerts=["TrainGpuFault"],
        ),
        lines(
            "NVLink and PCIe errors",
            "In 5 minutes: NVLink recoveries and replays, PCIe replays. A recovery is an alert. Empty is good.",
            Query(expr=_where("gpu:nvlink_recoveries:increase5m"), legend=f"recoveries, {_GPU}", color="red"),
            Query(expr=_where("gpu:nvlink_replays:increase5m"), legend=f"replays, {_GPU}", color="orange"),
            Query(expr=_where("gpu:pcie_replays:increase5m"), legend=f"PCIe replays, {_GPU}", color="blue"),
            unit="none",
            width=8,
            least=0,
            alerts=["TrainNetworkErrors"],
        ),
    ]


def _hosts() -> list[Part]:
    return [
        lines(
            "Link failures",
            "Of InfiniBand and network cards in 5 minutes: links that went down or had to recover.",
            Query(expr=_of_host("host:link_failures:increase5m"), legend=_HOST),
            unit="none",
            width=6,
            least=0,
            alerts=["TrainNetworkErrors"],
        ),
        lines(
            "Packet errors",
            "Of InfiniBand and network cards in 5 minutes; a few are everyday life.",
            Query(expr=_of_host("host:packet_errors:increase5m"), legend=_HOST),
            unit="none",
            width=6,
            least=0,
            limits=[100],
            alerts=["TrainNetworkErrors"],
        ),
        lines(
            "NVLink throughput",
            "Of all links of a GPU.",
            Query(expr=_of_gpu("gpu:nvlink_throughput:bytes"), legend=_GPU),
            unit="Bps",
            width=6,
            least=0,
        ),
        lines(
            "Processes that wait",
            "The part of 2 minutes in which some process of the host waited for a disk or a core: slow data.",
            Query(expr=_of_host("host:io_pressure:ratio_rate2m"), legend=f"disk, {_HOST}"),
            Query(expr=_of_host("host:cpu_pressure:ratio_rate2m"), legend=f"core, {_HOST}", style="dashed"),
            unit="percentunit",
            width=6,
            least=0,
        ),
    ]
