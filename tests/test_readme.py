"""Tests that the README's loop runs as printed and that its nodes agree."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"

AFTER = """
parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
found = [torch.empty_like(parameters) for _ in range(2)]
torch.distributed.all_gather(found, parameters)
line = f"rounds {sync.round_id} loss {loss.item()} equal {torch.equal(*found)}\\n"
print(line, end="", flush=True)  # in one write: both nodes share the pipe
"""
LAST = "torch.distributed.destroy_process_group()\n"


def test_the_loop_of_the_readme_trains_two_nodes_to_equal_parameters(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    program = tmp_path / "loop.py"
    assert block.endswith(LAST)
    program.write_text(block.removesuffix(LAST) + AFTER + LAST)  # unseeded: nodes begin with other weights
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program))
    done = subprocess.run(
        (sys.executable, *launch), cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("rounds")]
    assert len(lines) == 2
    for line in lines:
        said = dict(zip(line[::2], line[1::2], strict=True))
        assert (said["rounds"], said["equal"]) == ("11", "True"), "ten rounds and one at the end"
        assert float(said["loss"]) < 2, "the target has a variance of 8"
