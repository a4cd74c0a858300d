"""What figures were measured on, so that they can be read later."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "shardplug",
    "torch",
    "accelerate",
    "lightning",
    "pytorch-ignite",
    "torchdata",
    "grain",
)


def describe() -> dict[str, str | int | dict[str, str]]:
    """Describe the machine, and the releases that are installed."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "memory_gb": _memory_gb(),
        "system": platform.system(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _release(name))},
    }


def load() -> float:
    """Tell how many processes wanted to run, on average, in the last minute; 0 if unknown."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def _release(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    """Name the processor as Linux does, or as Python does."""
    told = Path("/proc/cpuinfo")
    if told.exists():
        for line in told.read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _memory_gb() -> int:
    """Count the memory, to whole gigabytes; 0 if it is unknown."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
