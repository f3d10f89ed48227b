"""The peak memory of a program of its own."""

# on Linux ru_maxrss begins with that of the parent, which may be large
PEAK = """
import pathlib, resource, sys
def peak():
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
"""
