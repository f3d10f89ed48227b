"""Libraries in C that are compiled when viper is installed and called through ctypes."""

import ctypes
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

COUNT, SIZE, ADDRESS, REAL = ctypes.c_int, ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_double  # types of arguments
WIDTHS = "_512", ""  # ends of the names of builds: with AVX-512, and for every machine


def c_functions(module: str, arguments: dict[str, list[Any]]) -> list[Callable[..., Any]] | None:
    """Return a library's functions of these names and argument types, which return an int or nothing.

    A function's name changes with its arguments, so an old library is never called. Returns None if the library was not
    built, is an older one without these names, or cannot run on this machine.
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


def right_functions(
    module: str, arguments: dict[str, list[Any]], is_right: Callable[[Callable[..., Any]], bool]
) -> list[Callable[..., Any]] | None:
    """Return the functions of one build, or None if there are none or the first fails its check."""
    functions = c_functions(module, arguments)
    return functions if functions and is_right(functions[0]) else None


def widest_functions(
    module: str, arguments: dict[str, list[Any]], is_right: Callable[[Callable[..., Any]], bool]
) -> list[Callable[..., Any]] | None:
    """Return the functions of the build with the widest vectors that this machine has, or None."""
    builds = (right_functions(module + width, arguments, is_right) for width in WIDTHS)
    return next((functions for functions in builds if functions), None)
