"""Print the addresses of the peers that a newcomer to a swarm finds, as `aedit join` does.

python -m benchmarks.programs.newcomer MULTIADDRESSES
"""

import json
import sys

from aedit.launch.swarm import introduced
from aedit.types import UserError

if __name__ == "__main__":
    try:
        print(json.dumps(introduced(sys.argv[1])))
    except UserError as error:
        sys.exit(str(error))
