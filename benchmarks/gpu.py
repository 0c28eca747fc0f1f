"""Measure everything that needs a GPU, unattended, and print one table.

    python -m benchmarks.gpu [--minutes 5] [--only PART] [--vllm-python PYTHON] [--device cuda|cpu] [--quick]

Parts: device, decode, edit, windows, vllm, speculation. Each runs in a process of its own that is ended when
its time is over; a part that fails has a row with the reason, and the others go on. vLLM adds up to three
minutes. `--device cpu` runs the same lines with small sizes: a trial of the benchmark, not a measurement.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.kit import tables
from benchmarks.kit.processes import ROOT, last_line, start
from benchmarks.kit.tables import Bar, Report
from benchmarks.programs.gpu_parts import PARTS, Job, Row

ABOUT = "Decoding, prefill, EDiT, offload, idle windows and speculation on one GPU, in one table."
VLLM_PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
SHARES = {"device": 0.08, "decode": 0.3, "edit": 0.22, "windows": 0.12}
"""Of the minutes; speculation has what is left."""
VLLM_S = 180.0
LEAST_S = 20.0
"""No part begins with less time: its imports alone take some seconds."""


def measure(job: Job, parts: Sequence[str], minutes: float) -> list[Row]:
    """Run the parts, one after the other, and return all rows. job: what they share."""
    console = Console(stderr=True, highlight=False)
    ends_s = time.monotonic() + 60 * minutes
    found: list[Row] = []
    for part in parts:
        left_s = VLLM_S if part == "vllm" else ends_s - time.monotonic()
        if left_s < LEAST_S:
            found.append(Row(part, "not run", f"{minutes:g} minutes were over"))
            continue
        share_s = 60 * minutes * SHARES[part] if part in SHARES else left_s
        began_s = time.monotonic()
        found += run_part(_with(job, part, min(share_s, left_s)), min(max(2 * share_s, LEAST_S), left_s))
        took_s = time.monotonic() - began_s
        ends_s += took_s if part == "vllm" else 0.0
        console.print(f"{part}: {took_s:.0f} s")
    return found


def run_part(job: Job, limit_s: float) -> list[Row]:
    """Return the rows of one part, and one that says why if it did not come to its end."""
    log = Path(job.root) / "gpu" / f"{job.part}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as err:
        process = start(
            "benchmarks.programs.gpu_parts", json.dumps(asdict(job)), stdout=subprocess.PIPE, stderr=err
        )
        why = ""
        try:
            out, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            out, _ = process.communicate()
            why = f"ended after {limit_s:.0f} s"
    rows = [Row(**json.loads(line)) for line in out.splitlines() if line.startswith("{")]
    if process.returncode:
        why = why or last_line(log)
        rows.append(Row(job.part, "failed" if not rows else "failed later", why))
    return rows


def report(rows: Sequence[Row], device: str, quick: bool) -> Report:
    """Return the table. quick: no bar is decided."""
    verdicts = {True: "PASS", False: "MISS", None: ""}
    cells = []
    for row in rows:
        passed = "" if quick else verdicts[row.passed]
        cells.append((row.what, row.value, row.beside, row.wanted, passed))
    decided = [row for row in rows if row.passed is not None and not quick]
    failed = [row.what for row in rows if row.value.startswith("failed")]
    bars = [
        Bar(
            f"{sum(bool(row.passed) for row in decided)} of {len(decided)} bars",
            all(r.passed for r in decided),
        )
    ]
    bars += [Bar(f"{what} did not come to its end", False) for what in failed]
    return Report(
        "one GPU" if device != "cpu" else "trial on a CPU: no figure means anything",
        (machine(device), "Ratios: median [95 % by bootstrap] within a turn."),
        ("what", "measured", "beside", "wanted", "verdict"),
        tuple(cells),
        tuple(bars) if decided else tuple(bars[1:]),
        {"rows": [asdict(row) for row in rows]},
    )


def machine(device: str) -> str:
    """Return device and versions in one line."""
    versions = f"torch {torch.__version__}, transformers {version('transformers')}"
    if device == "cpu":
        return versions
    about = torch.cuda.get_device_properties(0)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return (
        f"{about.name}, {about.total_memory / 2**30:.0f} GiB, capability {about.major}.{about.minor}, "
        f"driver {_driver()}, CUDA {torch.version.cuda}, NCCL {nccl}, {versions}"
    )


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.split("\n")[0].strip() or "unknown"


def _with(job: Job, part: str, seconds: float) -> Job:
    return Job(**(asdict(job) | {"part": part, "seconds": seconds}))


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--minutes", type=_minutes, default=5.0, help="for all parts but vllm")
    add("--only", choices=tuple(PARTS), action="append", help="one part; may be given more than once")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small sizes, as a trial of the lines")
    add("--vllm-python", type=Path, default=VLLM_PYTHON, help="interpreter with vLLM for this device")
    add("--root", type=Path, default=ROOT / "runs", help="where policies and logs are kept")


def _minutes(text: str) -> float:
    if not 0 < (minutes := float(text)) <= 600:
        raise ValueError(text)
    return minutes


def _asked(args: argparse.Namespace) -> Report | str:
    if args.device == "cuda" and not torch.cuda.is_available():
        return "needs a CUDA device: not run; --device cpu runs the same lines with small sizes"
    small = args.quick or args.device == "cpu"
    job = Job(
        part="", device=args.device, small=small, root=str(args.root), vllm_python=str(args.vllm_python)
    )
    parts = list(dict.fromkeys(args.only or PARTS))
    if "vllm" in parts and not args.vllm_python.exists():
        parts.remove("vllm")
        Console(stderr=True).print(f"vllm: not run, as {args.vllm_python} is missing", highlight=False)
    return report(measure(job, parts, args.minutes), args.device, small)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    tables.main("gpu", ABOUT, _asked, options=_options, words=words)


if __name__ == "__main__":
    main()
