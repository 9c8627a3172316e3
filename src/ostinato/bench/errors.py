"""What ends a command with exit code 1."""


class BenchError(RuntimeError):
    """A measurement that would not mean what it says: unequal tokens, or a step that ran in another mode."""
