"""What ends a request, or a step, and came from the code of a user."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class RequestError(RuntimeError):
    """A request ended with an error: of its own logits processor or function of allowed tokens, or of a step it was in.

    The message names what failed; `__cause__` is what was raised there.
    """


class HookError(RuntimeError):
    """A hook raised, so that a step could not be served. The message names the hook; `__cause__` is what it raised."""


def what_failed(where: str, error: BaseException) -> str:
    """One line: where, the type of the error, and its message."""
    return f"{where} raised {type(error).__name__}" + (f": {error}" if str(error) else "")


@contextmanager
def own_code(where: str) -> Iterator[None]:
    """Within the body runs what a request brought along."""
    try:
        yield
    except Exception as error:
        raise RequestError(what_failed(where, error)) from error


def name_of(function: Callable[..., Any]) -> str:
    """What a user calls a function."""
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]
