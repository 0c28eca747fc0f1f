"""Job of tests/test_extending.py: run the code blocks of docs/extending.md one after the other."""

import os
import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "extending.md"


def run_page(rank, size, out):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names = {"__name__": "page"}
    here = os.getcwd()
    os.chdir(out)
    try:
        for number, block in enumerate(blocks, start=1):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    finally:
        os.chdir(here)
    sync, callback = names["sync"], names["callback"]
    return {"landed": sync.round_id, "steps": sync.steps, "trainer": callback.sync.steps}
