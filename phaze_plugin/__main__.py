"""`python -m phaze` is `phaze`."""

import sys

from phaze.cli import main

if __name__ == "__main__":
    sys.exit(main())
