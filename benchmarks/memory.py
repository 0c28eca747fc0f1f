"""Measure the memory of a run's processes beside what `aedit run --dry-run` says. Bar: within 15 % each.

One node with a rollout worker and the hub on this machine, and a policy of 25 M parameters, so that its
copies weigh as much as the programs. Measured is the highest resident memory, as the kernel notes it for each
process; it includes activations, and memory that the allocator keeps.
"""

import tempfile
import time
import tomllib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import tomli_w

from aedit.launch.config import Placement, load
from aedit.launch.processes.plan import MIB
from aedit.launch.processes.plan import measure as plan_of
from benchmarks.kit.processes import ENDS_WITHIN_S, ROOT, start, until
from benchmarks.kit.tables import Bar, Report, main

WITHIN = 0.15
PRESET = ROOT / "configs" / "tiny-rl.toml"
SIZES = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
ROLES = {
    "agent_main": "agent",
    "server.worker": "worker",
    "trainer_process": "drafter's trainer",
    "aedit.launch.hub": "hub",
    "distributed.run": "torchrun",
    "aedit.launch.node": "node",
}
"""Part of a command line, the first that fits; torchrun's holds that of the node."""
JUDGED = ("node", "agent", "hub", "worker")
LOOK_S = 0.3


def table(quick: bool) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        config = _configured(Path(folder), quick)
        plan = plan_of(load(config, []).config, Placement(nodes=1, local=True))
        found = _peaks(config, Path(folder))
    rows, bars = list[tuple[str, ...]](), list[Bar]()
    for each in plan.processes():
        said, seen = each.resident_bytes / MIB, found.get(each.name, 0) / MIB
        difference = f"{said / seen - 1:+.0%}" if seen else ""
        rows.append((each.name, f"{said:.0f}", f"{seen:.0f}", difference))
        if each.name in JUDGED:
            text = f"{each.name}: {said:.0f} MiB said, {seen:.0f} measured, bar 15 %"
            bars.append(Bar(text, None if quick else bool(seen) and abs(said / seen - 1) <= WITHIN))
    return Report(
        "memory of a run on one machine",
        (
            f"{PRESET.name} with {plan.num_params:,} parameters, one node, one worker. In MiB;"
            " what processes share is in each of them.",
        ),
        ("process", "--dry-run", "measured", "difference"),
        tuple(rows),
        tuple(bars),
        {"said": [asdict(each) for each in plan.processes()], "measured_bytes": found},
    )


def _configured(folder: Path, quick: bool) -> Path:
    preset = tomllib.loads(PRESET.read_text())
    if not quick:
        preset["model"]["sizes"] |= SIZES | {"num_key_value_heads": SIZES["num_attention_heads"]}
    preset["train"] |= {"steps": 6, "batch_size": 4}
    preset["rl"] |= {"groups": 2, "group_size": 2, "workers": 1, "supervised_steps": 1, "max_staleness": 1}
    preset["edit"] |= {"every": 2, "schedule": "steps"}
    preset["local"] = {"slowdown": [1]}
    config = folder / "memory.toml"
    config.write_text(tomli_w.dumps(preset | {"name": "memory", "dir": str(folder / "runs")}))
    return config


def _peaks(config: Path, folder: Path) -> dict[str, int]:
    """Run it; return the highest resident bytes of the processes of each role."""
    found: dict[str, int] = {}
    with (folder / "output").open("w+") as output:
        process = start("aedit", "run", str(config), "--local", "1", stdout=output, stderr=output)
        top = psutil.Process(process.pid)

        def look() -> bool:
            with suppress(psutil.Error):
                for each in (top, *top.children(recursive=True)):
                    with suppress(psutil.Error, OSError):  # one that has ended hides none of the others
                        role = "aedit run" if each == top else _role(" ".join(each.cmdline()))
                        found[role] = max(found.get(role, 0), _peak_bytes(each.pid))
            time.sleep(LOOK_S)
            return process.poll() is not None

        try:
            until(look, "the end of the run", 4 * ENDS_WITHIN_S)
        finally:
            process.terminate()
            process.wait(ENDS_WITHIN_S)
        if process.returncode:
            output.seek(0)
            raise RuntimeError(output.read())
    return found


def _role(command: str) -> str:
    return next((role for part, role in ROLES.items() if part in command), "")


def _peak_bytes(pid: int) -> int:
    """Return the highest resident memory so far, and 0 for a process that has ended."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


if __name__ == "__main__":
    main("memory", "Memory of a run's processes beside --dry-run.", table)
