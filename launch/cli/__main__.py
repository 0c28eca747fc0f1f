"""Entry point of `python -m aedit.launch.cli`."""

import sys

from aedit.launch.cli.main import main

sys.exit(main())
