"""What this machine and this process are: processor, memory, peak memory, OpenMP runtimes. Linux's /proc, no torch."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import resource
import sys
from pathlib import Path

_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b[^/]*\.so[^/]*$")


def available_memory() -> int | None:
    """Bytes that can be taken without swapping, or None where the system does not say."""
    return _proc_kib("/proc/meminfo", "MemAvailable")


def peak_memory() -> int:
    """Bytes: largest resident size of this process so far, or since `reset_peak_memory` where that works."""
    found = _proc_kib("/proc/self/status", "VmHWM")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # bytes on macOS, KiB elsewhere


def reset_peak_memory() -> bool:
    """Give freed memory back to the system and start `peak_memory` anew; False where that cannot be done."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # 5: reset the peak resident size
    except OSError:
        return False
    return True


def processor() -> str:
    """The processor's name as the system gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def openmp_runtimes() -> list[str]:
    """Files of the OpenMP runtimes loaded in this process; more than one means pools that get in each other's way."""
    with contextlib.suppress(OSError):
        paths = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
        return sorted(p for p in paths if _OPENMP.search(p))
    return []


def _proc_kib(path: str, key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None
