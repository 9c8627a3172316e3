"""`python -m ostinato` is the command `ostinato`."""

from .cli import main

if __name__ == "__main__":
    main()
