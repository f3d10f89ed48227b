"""How much main memory a process may use: that of the machine, or of its control group (a container) if less."""

import math
import os
from pathlib import Path

ASSUMED_MEMORY = float(1 << 32)  # bytes assumed to be available if the system does not report them
SHARE_FOR_CACHE = 0.25  # share of the available memory that may hold rows of files
GROUP = "/sys/fs/cgroup"  # where Linux reports the limits of a container


def machine_memory() -> float:
    """Return the bytes of main memory, used or not; infinity if the system does not report them."""
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
    files = system_numbers(f"{GROUP}/memory.stat").get("inactive_file", 0)  # pages the system frees on demand
    return max(0.0, min(free, float(limit) - float(used) + files))


def system_numbers(path: str) -> dict[str, int]:
    """Return the numbers in a system file whose lines begin with a name and a number."""
    words = (line.split() for line in system_text(path).splitlines())
    return {first: int(rest[0]) for first, *rest in words if rest and rest[0].isdigit()}


def system_text(path: str) -> str:
    """Return the content of a system file, or an empty string if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""
