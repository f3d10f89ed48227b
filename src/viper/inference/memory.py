"""How much main memory a process may use: the machine's, or that of its control group (a container) if less."""

import math
import os
from pathlib import Path

ASSUMED_MEMORY = float(1 << 32)  # bytes that are available, where the system does not say
SHARE_FOR_CACHE = 0.25  # of the available memory, for rows of files
GROUP = "/sys/fs/cgroup"  # where Linux tells the limits of a container


def machine_memory() -> float:
    """Return all bytes of main memory, used or not; infinity where the system does not tell."""
    try:
        whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        whole = math.inf
    limit = system_text(f"{GROUP}/memory.max")
    return min(whole, float(limit)) if limit.isdigit() else whole


def available_memory() -> float:
    """Return the bytes that this process may still use."""
    known = system_numbers("/proc/meminfo")
    free = 1024.0 * known["MemAvailable:"] if "MemAvailable:" in known else ASSUMED_MEMORY
    limit, used = system_text(f"{GROUP}/memory.max"), system_text(f"{GROUP}/memory.current")
    if not limit.isdigit() or not used.isdigit():
        return free
    files = system_numbers(f"{GROUP}/memory.stat").get("inactive_file", 0)  # the system gives these up when asked
    return max(0.0, min(free, float(limit) - float(used) + files))


def system_numbers(path: str) -> dict[str, int]:
    """Return the names and numbers in the lines of a file of the system."""
    words = (line.split() for line in system_text(path).splitlines())
    return {first: int(rest[0]) for first, *rest in words if rest and rest[0].isdigit()}


def system_text(path: str) -> str:
    """Return the content of a file of the system, or nothing if there is no such file."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
