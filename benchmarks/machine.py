"""The machine that a measurement was made on, without names or paths of it."""

import os
import platform
from pathlib import Path
from typing import Any

from upfl.environment import environment


def machine() -> dict[str, Any]:
    facts = environment()
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        **{key: facts[key] for key in ("commit", "python", "torch", "system", "started")},
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
