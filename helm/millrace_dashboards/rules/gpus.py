"""GPUs, by the metrics of NVIDIA's DCGM exporter. They cover all nodes of Prometheus: the labels do not name
the deployment of a GPU once the pod has gone.

DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL is not among the exporter's default counters; all others are.
"""

from __future__ import annotations

from millrace_dashboards.alert import Alert, Thresholds
from millrace_dashboards.promql import largest, ratio, smallest

BY_NODE = ("Hostname",)
BY_GPU = (*BY_NODE, "gpu")
OF_PROGRAMS = (13, 31, 43, 45)  # XIDs that a program causes on a sound GPU
BUSY = 50  # percent
NAMED = "GPU {{ $labels.gpu }} of {{ $labels.Hostname }}"


def alerts(t: Thresholds) -> tuple[Alert, ...]:
    clock = largest(f"avg_over_time(DCGM_FI_DEV_SM_CLOCK[{t.window}])", *BY_GPU)
    use = largest(f"avg_over_time(DCGM_FI_DEV_GPU_UTIL[{t.window}])", *BY_GPU)
    return (
        Alert(
            "GpuXid",
            f"{NAMED}: the driver reports XID {{{{ $value }}}}.",
            " != ".join((largest("DCGM_FI_DEV_XID_ERRORS", *BY_GPU), *map(str, OF_PROGRAMS))),
            0,
            "0m",
            by=BY_GPU,
        ),
        Alert(
            "GpuMemoryErrors",
            f"{NAMED}: {{{{ $value }}}} rows of its memory had errors that ECC could not correct.",
            _more("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", t.restart_window),
            0,
            "0m",
            by=BY_GPU,
        ),
        Alert(
            "GpuMemoryBroken",
            f"{NAMED}: a broken row of its memory cannot be replaced.",
            largest("DCGM_FI_DEV_ROW_REMAP_FAILURE", *BY_GPU),
            0,
            "0m",
            by=BY_GPU,
        ),
        Alert(
            "GpuNvlinkErrors",
            f"{NAMED}: an NVLink failed and was trained again.",
            _more("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", t.restart_window),
            0,
            "0m",
            by=BY_GPU,
        ),
        Alert(
            "GpuSlow",
            f"{NAMED} is busy and runs at {{{{ $value | humanizePercentage }}}} of the clock of another one there.",
            ratio(clock, f"on ({', '.join(BY_NODE)}) group_left () {largest(clock, *BY_NODE)}"),
            t.gpu_clock,
            "10m",
            guard=f"{use} > {BUSY}",
            by=BY_GPU,
            unit="percentunit",
            sign="<",
        ),
    )


def _more(counter: str, window: str) -> str:
    """How much a counter of a GPU grew in the window. Its series change with the pods on the GPU, so no increase()."""
    return f"{largest(counter, *BY_GPU)} - {smallest(f'min_over_time({counter}[{window}])', *BY_GPU)}"
