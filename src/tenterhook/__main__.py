"""`python -m tenterhook` is the same as `tenterhook`."""

import sys

from tenterhook.cli import main

if __name__ == "__main__":
    sys.exit(main())
