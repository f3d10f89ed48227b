"""Ctrl-C and SIGTERM as an exception that removes partial output on its way out, whatever it meets there."""

import os
import signal
import threading
from types import FrameType

RECEIVED: list[int] = []  # the signals, the last one last
RETRY_SECONDS = 0.05  # until a signal that came during an import is delivered again
IMPORT_SYSTEM = "<frozen importlib._bootstrap>"  # the file of the frames that load a module


def catch_signals() -> None:
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


def interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt. While a module is loaded, try again a little later: torch aborts when interrupted."""
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
    """Raise KeyboardInterrupt if there was a signal whose exception something swallowed, as some C libraries do."""
    if RECEIVED:
        raise KeyboardInterrupt


def exit_code() -> int:
    """Return 128 plus the number of the last signal."""
    return 128 + (RECEIVED or [signal.SIGINT])[-1]
