"""``python -m attnkit``: the same as the command ``attnkit``."""

import sys

from attnkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
