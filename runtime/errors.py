"""What ends a request, or a step, and came from the code of a user."""

from collections.abc import Callable
from typing import Any


class RequestError(RuntimeError):
    """A request ended with an error: of its own logits processor, of its own token mask, or of a step it was in.

    The message names what failed; `__cause__` is what was raised there.
    """


class HookError(RuntimeError):
    """A hook raised, so that a step could not be served. The message names the hook; `__cause__` is what it raised."""


def what_failed(where: str, error: BaseException) -> str:
    """One line: where, the type of the error, and its message."""
    return f"{where} raised {type(error).__name__}" + (f": {error}" if str(error) else "")


def name_of(function: Callable[..., Any]) -> str:
    """What a user calls a function."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]
