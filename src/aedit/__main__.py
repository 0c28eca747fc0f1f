"""`python -m aedit`: the `aedit` command, also where the script is not on PATH."""

import sys

from aedit.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
