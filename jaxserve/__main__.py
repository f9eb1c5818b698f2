"""`python -m jaxserve ...` is the same as `jaxserve ...`."""

import sys

from jaxserve.cli import main

if __name__ == "__main__":  # the engine process is spawned, and a spawned process imports this module again
    sys.exit(main())
