"""Entry point of one process of a node: `torchrun -m aedit.launch.node run.toml`."""

import sys

from aedit.launch.node.main import main

sys.exit(main())
