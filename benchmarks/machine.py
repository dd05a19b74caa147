"""The machine that a benchmark runs on, in one line: python benchmarks/machine.py"""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import transformers

CPU_INFO = Path("/proc/cpuinfo")


def machine() -> str:
    """CPU model, cores, threads and versions."""
    return (
        f"{cpu_model()}, {len(os.sched_getaffinity(0))} cores, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    )


def cpu_model() -> str:
    """What the processor calls itself, and its architecture where it does not say."""
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} ({platform.machine()})" if names else platform.machine()


if __name__ == "__main__":
    print(machine())
