"""How fast this machine reads memory and multiplies: measured with NumPy in under 3 seconds, then cached.

No torch. Other programs slow a machine down but never speed it up, so a new measurement can only raise what the
cache holds: the largest figure ever seen is the nearest to the limit.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import json
import os
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

_VERSION = 1  # of the cache file
_MIB = 1 << 20
_SIZES = (4 * _MIB, 16 * _MIB, 64 * _MIB, 256 * _MIB)  # working sets, the last beyond most caches
_PART = 8 * _MIB  # read at a time by one thread: half a millisecond, so that some parts escape other programs
_SIDE = 512  # of the product that one thread repeats, for the same reason
_PERCENTILE = 0.98  # of a thread's reads that counts: slower parts were disturbed, the very fastest lay in a cache
_BUSY = 0.5  # load per CPU from which a measurement says so
_SECONDS = 0.3  # per measurement; five of them
# Products per second of a unit over those of the same core's float32 vectors: what the instruction does in a cycle.
_UNITS = (
    ("amx_bf16", "bf16", 16.0),
    ("avx512_bf16", "bf16", 2.0),
    ("amx_int8", "int8", 32.0),
    ("avx512_vnni", "int8", 4.0),
    ("avx_vnni", "int8", 4.0),
    ("amx_fp16", "fp16", 16.0),
    ("avx512_fp16", "fp16", 2.0),
)


@dataclasses.dataclass(frozen=True)
class Probe:
    """What was measured: bytes/s of reading a working set of so many bytes, FLOP/s by dtype, and where and when."""

    processor: str
    threads: int
    memory_bytes: float | None
    read_bytes_per_s: tuple[tuple[int, float], ...]
    flops: dict[str, float]
    measured: str
    numpy: str
    notes: str


_known: dict[Path, Probe] = {}  # of this process, so that a cache that cannot be written costs one measurement


def probe(again: bool = False) -> Probe:
    """This machine's figures: from the cache, or measured and cached.

    again  measure although the cache has figures, and keep the larger of each.
    """
    path = cache_file()
    cached = _known.get(path) or _load(path)
    if cached is None or again:
        found = _measure()
        cached = found if cached is None else _larger(cached, found)
        _store(path, cached)
    _known[path] = cached
    return cached


def _load(path: Path) -> Probe | None:
    try:
        return _from_document(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # not there, damaged, or of another version: measure anew


def _from_document(document: dict[str, Any]) -> Probe:
    if document["version"] != _VERSION:
        raise ValueError(f"version {document['version']}, expected {_VERSION}")
    values = document["probe"]
    rates = tuple((int(size), float(rate)) for size, rate in values["read_bytes_per_s"])
    flops = {str(k): float(v) for k, v in values["flops"].items()}
    if not rates or not all(v > 0 for v in (*(r for _, r in rates), *flops.values())) or "fp32" not in flops:
        raise ValueError("figures are missing")
    return Probe(**{**values, "read_bytes_per_s": rates, "flops": flops})


def cache_dir() -> Path:
    """Where figures are kept: FANFOLD_CACHE, else the user's cache directory with "fanfold" in it."""
    given = os.environ.get("FANFOLD_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fanfold"


def cache_file() -> Path:
    """The file of this machine, by its processor and the CPUs this process may use."""
    key = hashlib.sha256(f"{processor()}|{threads()}|{np.__version__}".encode()).hexdigest()[:12]
    return cache_dir() / f"hardware-{key}.json"


def _store(path: Path, found: Probe) -> None:
    """Write a temporary file beside `path`, flush it, rename it. A cache that cannot be written is done without."""
    text = json.dumps({"version": _VERSION, "probe": dataclasses.asdict(found)}, indent=2)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


def _larger(a: Probe, b: Probe) -> Probe:
    old = dict(a.read_bytes_per_s)
    rates = tuple((size, max(rate, old.get(size, 0.0))) for size, rate in b.read_bytes_per_s)
    flops = {k: max(a.flops.get(k, 0.0), b.flops.get(k, 0.0)) for k in {**a.flops, **b.flops}}
    return dataclasses.replace(b, read_bytes_per_s=rates, flops=flops)


def _measure() -> Probe:
    memory = _memory_bytes()
    sizes = [s for s in _SIZES if memory is None or s < memory / 8] or [_SIZES[0]]
    load = _load_average()
    words = np.ones(sizes[-1] // 8, np.int64)
    rates = [(size, _read_rate(words[: size // 8])) for size in sizes]
    fp32 = _product_rate()
    flops, notes = _by_dtype(fp32)
    if load is not None and load > _BUSY * threads():
        again = "`fanfold cost … --hardware this --probe` on a quiet machine raises it"
        notes += f"; measured under load ({load:.1f} on {threads()} CPUs), {again}"
    return Probe(
        processor=processor(),
        threads=threads(),
        memory_bytes=memory,
        read_bytes_per_s=_falling(rates),
        flops=flops,
        measured=time.strftime("%Y-%m-%d"),
        numpy=np.__version__,
        notes=notes,
    )


def _read_rate(words: np.ndarray[Any, np.dtype[np.int64]]) -> float:
    """Bytes per second of all threads, each reading its own share of `words` over and over, part by part."""
    share = len(words) // threads()
    length = max(1, min(_PART // 8, share))

    def task(index: int) -> list[Callable[[], object]]:
        own = words[index * share : (index + 1) * share]
        parts = [own[i : i + length] for i in range(0, share - length + 1, length)]
        return [functools.partial(np.bitwise_or.reduce, part) for part in parts]

    return length * 8 * sum(1 / t for t in _seconds(task, _PERCENTILE))


def _product_rate() -> float:
    """FLOP/s in float32 of all threads, each with products of its own; one thread's BLAS cannot be had everywhere."""

    def task(_: int) -> list[Callable[[], object]]:
        a, b, c = (np.ones((_SIDE, _SIDE), np.float32) for _ in range(3))
        return [functools.partial(np.matmul, a, b, out=c)]

    flop = 2 * _SIDE**3
    with _blas_of_one_thread() as alone:
        if alone:
            return flop * sum(1 / t for t in _seconds(task, 1.0))
    return flop / min(_seconds(task, 1.0, 1))


def _seconds(
    task: Callable[[int], list[Callable[[], object]]], percentile: float, count: int | None = None
) -> list[float]:
    """For each thread the time of one of its parts, at that percentile of their speed. All run at the same time."""
    found: list[float] = []

    def run(index: int) -> None:
        parts = task(index)
        times = []
        end = time.perf_counter() + _SECONDS
        while time.perf_counter() < end or len(times) < 2 * len(parts):
            for part in parts:
                begin = time.perf_counter()
                part()
                times.append(time.perf_counter() - begin)
        times = sorted(times[len(parts) :])  # the first round fills the caches
        found.append(times[int((1 - percentile) * len(times))])

    workers = [threading.Thread(target=run, args=(i,)) for i in range(count or threads())]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


@contextlib.contextmanager
def _blas_of_one_thread() -> Iterator[bool]:
    """While it lasts, NumPy's OpenBLAS uses the calling thread only; yields False where that is not NumPy's BLAS."""
    functions = _openblas()
    if functions is None:
        yield False
        return
    get, set_ = functions
    before = get()
    set_(1)
    try:
        yield True
    finally:
        set_(before)


def _openblas() -> tuple[Any, Any] | None:
    """The functions that get and set the number of threads of the OpenBLAS that NumPy's wheels carry, or None."""
    for path in Path(np.__file__).parents[1].glob("numpy.libs/*openblas*"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            return library.scipy_openblas_get_num_threads64_, library.scipy_openblas_set_num_threads64_
    return None


def _falling(rates: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """A smaller working set is read at least as fast: it lies in no slower a cache."""
    out: list[tuple[int, float]] = []
    best = 0.0
    for size, rate in reversed(rates):
        best = max(best, rate)
        out.append((size, best))
    return tuple(reversed(out))


def _by_dtype(fp32: float) -> tuple[dict[str, float], str]:
    flops, notes = {"fp32": fp32}, ["fp32 measured"]
    flags = cpu_flags()
    for flag, dtype, factor in _UNITS:
        if flag in flags and dtype not in flops:
            flops[dtype] = fp32 * factor
            notes.append(f"{dtype}: {factor:g} x fp32, by {flag}")
    for dtype in ("bf16", "fp16", "int8", "fp8"):
        if dtype not in flops:
            flops[dtype] = fp32
            notes.append(f"{dtype}: as fp32, widened")
    return flops, "; ".join(notes)


def _load_average() -> float | None:
    """Processes that ran or waited to run over the last minute, or None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def threads() -> int:
    """CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _cpuinfo(key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return ""


def processor() -> str:
    """The processor's name as the system gives it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """The instruction sets that the system reports, in Linux's names."""
    return frozenset(_cpuinfo("flags").split())


def _memory_bytes() -> float | None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return None
