"""Turn Ctrl-C and SIGTERM into KeyboardInterrupt, so that partial output is removed on the way out."""

import os
import signal
import threading
from types import FrameType

RECEIVED: list[int] = []  # signals so far, the latest last
RETRY_SECONDS = 0.05  # before a signal that came during an import is sent again
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"  # the file of the frames that load a module


def catch_signals() -> None:
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. While a module is being loaded, try again a little later: torch would abort."""
    if is_importing(frame):
        timer = threading.Timer(RETRY_SECONDS, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
        return
    RECEIVED.append(number)
    raise KeyboardInterrupt


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORT_SYSTEM:
            return True
        frame = frame.f_back
    return False


def stop_if_interrupted() -> None:
    """Raise KeyboardInterrupt if a signal's exception was swallowed, as some C libraries do."""
    if RECEIVED:
        raise KeyboardInterrupt


def exit_code() -> int:
    """Return 128 plus the number of the last signal."""
    return 128 + (RECEIVED or [signal.SIGINT])[-1]
