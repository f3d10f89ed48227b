"""Libraries in C that are compiled when viper is installed and called through ctypes."""

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def c_functions(module: str, arguments: dict[str, list[Any]]) -> list[Callable[..., Any]] | None:
    """Return a library's functions of these names and argument types, which return an int.

    None if it was not built, is an older one without these names, or cannot run on this machine.
    """
    built = find_spec(module)
    if built is None or built.origin is None:
        return None
    try:
        library = ctypes.CDLL(built.origin)
        functions = [getattr(library, name) for name in arguments]
    except (OSError, AttributeError):
        return None
    for function, kinds in zip(functions, arguments.values(), strict=True):
        function.argtypes = kinds
    return functions
