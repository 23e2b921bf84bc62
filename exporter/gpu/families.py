"""The text of a page by family: what GPUs show, and what the exporter says of itself."""

from exporter.exposition import number
from exporter.gpu.table import TABLE

# Beside the table: kind and help. The first three are dcgm-exporter's own, type and all (its windows only look like
# counters: they go down again).
_OTHERS = {
    "DCGM_FI_DEV_XID_ERRORS": ("gauge", "Value of the last XID error encountered."),
    "DCGM_EXP_XID_ERRORS_COUNT": ("counter", "reported XIDs during last window"),
    "DCGM_EXP_CLOCK_EVENTS_COUNT": ("counter", "reported clock events"),
    "gpu_xid_events_total": ("counter", "XIDs reported since the exporter started, by what they speak of."),
    "gpu_lost": ("gauge", "1 for a GPU that answered before and does not any more, until the exporter starts anew."),
    "gpu_job_info": ("gauge", "Always 1; whose work runs on the GPU, as labels, where it can be told."),
    "gpu_exporter_nvml_up": ("gauge", "1 while the driver answers."),
    "gpu_exporter_gpus": ("gauge", "GPUs that the driver counts."),
    "gpu_exporter_last_collect_timestamp_seconds": ("gauge", "When the GPUs were last read."),
    "gpu_exporter_collect_seconds": ("gauge", "How long the last collection took."),
    "gpu_exporter_collector_error": ("gauge", "1 if the last collection had an error at the GPU of this index."),
    "gpu_exporter_invalid_values_total": ("counter", "Values left out because they can't be true, or say none."),
    "gpu_exporter_unavailable": ("gauge", "Devices that don't have this metric, and why."),
    "gpu_exporter_restarts_total": ("counter", "Starts of the reading process after the first one."),
}
METRICS = {row.name: (row.kind, row.help) for row in TABLE} | _OTHERS


class Families:
    """Samples by family, in the order of `METRICS`: each by its labels as they stand in the text, braces and all."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, float]] = {name: {} for name in METRICS}

    def add(self, name: str, labels: str, value: float) -> None:
        """One sample."""
        self.samples[name][labels] = value

    def merge(self, other: "Families") -> None:
        """Take over all samples of another page."""
        for name, samples in other.samples.items():
            self.samples[name].update(samples)

    def texts(self) -> dict[str, str]:
        """Each family that has samples: HELP, TYPE and a line for each."""
        found = {}
        for name, samples in self.samples.items():
            if samples:
                kind, text = METRICS[name]
                lines = "".join(f"{name}{labels} {number(value)}\n" for labels, value in samples.items())
                found[name] = f"# HELP {name} {text}\n# TYPE {name} {kind}\n{lines}"
        return found
