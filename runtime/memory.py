"""What is said when memory runs out."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class NotEnoughMemoryError(MemoryError):
    """Memory ran out. The message says for what, how much of it, and what would make it less."""


@contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Within the body, an allocation that fails says what it was for.

    Raises:
        NotEnoughMemoryError: an allocation failed; one that says so already passes through.
    """
    try:
        yield
    except NotEnoughMemoryError:
        raise
    except (RuntimeError, MemoryError) as error:
        # torch has a type for a device that is full, and none for a host.
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
        reason = f" ({str(error).splitlines()[0]})" if str(error) else ""
        raise NotEnoughMemoryError(f"not enough memory for {what}: {advice}{reason}") from error
