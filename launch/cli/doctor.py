"""`aedit doctor`: check this machine and a configuration, with advice for each problem."""

import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aedit.launch.config import RunConfig
from aedit.launch.data import check_data, check_rewards, check_source
from aedit.system import num_cores
from aedit.types import UserError

GIB = 2**30
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}
EXTRAS = {
    "datasets": ("datasets", "pyarrow"),
    "gym": ("reasoning_gym",),
    "math": ("math_verify",),
    "swarm": ("hivemind",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


Check = tuple[str, Literal["ok", "warn", "fail"], str, str]
"""Name, state, what was found, and advice."""


def doctor(config_paths: Sequence[Path], console: Console | None = None) -> int:
    """Print a table of checks; return 0, or 2 if one of them failed."""
    checks = [*_machine(), *_torch(), *_extras(), *(_configuration(config_paths) if config_paths else ())]
    table = Table(box=None, pad_edge=False)
    for heading in ("check", "state", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for name, state, found, advice in checks:
        # `aedit[datasets]` is no markup.
        table.add_row(name, f"[{COLOURS[state]}]{state}[/]", escape(found), escape(advice))
    (console or Console()).print(table)
    return 2 if any(state == "fail" for _, state, _, _ in checks) else 0


def _machine() -> Iterator[Check]:
    yield _required("python", sys.version_info >= (3, 11), platform.python_version(), "use 3.11 or newer")
    cores = num_cores()
    yield _advised("cpu cores", cores > 1, str(cores), "local runs will be slow")
    free = psutil.virtual_memory().available / GIB
    yield _advised(
        "free memory", free >= 2, f"{free:.1f} GiB", "close other programs, or use a smaller model"
    )
    free = shutil.disk_usage(".").free / GIB
    yield _advised("free disk here", free >= 1, f"{free:.1f} GiB", "make room, or give another --dir")


def _torch() -> Iterator[Check]:
    if importlib.util.find_spec("torch") is None:
        yield _required("torch", False, "not installed", "pip install torch")
        return
    import torch
    from torch import distributed

    yield _required("torch", True, torch.__version__)
    gloo = distributed.is_available() and distributed.is_gloo_available()
    yield _required("gloo", gloo, _yes(gloo), "install a torch with Gloo: nodes meet by it")
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        yield _required("gpus", True, "none: training runs on the CPU")
        return
    yield _required("gpus", True, f"{num_gpus} x {torch.cuda.get_device_name(0)}")
    nccl = distributed.is_nccl_available()
    yield _required("nccl", nccl, _yes(nccl), "install a torch with NCCL, or --device cpu")


def _extras() -> Iterator[Check]:
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if not _is_installed(name)]
        found = f"no {', '.join(missing)}" if missing else "installed"
        yield _advised(f"extra {extra}", not missing, found, f"if you need it: pip install 'aedit[{extra}]'")


def _configuration(paths: Sequence[Path]) -> Iterator[Check]:
    from aedit.launch.config import load

    names = ", ".join(map(str, paths))
    try:
        config = load(paths, []).config
    except UserError as error:
        yield "configuration", "fail", names, str(error)
        return
    yield "configuration", "ok", f"{names}: every key is known and every value fits", ""
    yield from _files(config)
    yield _buildable(config)


def _files(config: RunConfig) -> Iterator[Check]:
    source = config.prompts.source or config.data.source
    try:
        if config.prompts.source:
            check_source(config.prompts.source)
            check_rewards(config)
        else:
            check_data(config.data)
    except UserError as error:
        yield "data", "fail", source, str(error)
    else:
        later = bool(config.prompts.source) or source.startswith("hf:")
        what = "read when the run starts" if later else "there, readable and enough"
        yield "data", "ok", f"{source}: {what}", ""
    for extra in _needed(config):
        missing = [name for name in EXTRAS[extra] if not _is_installed(name)]
        state = f"no {', '.join(missing)}" if missing else "installed"
        yield _required(f"needs {extra}", not missing, state, f"pip install 'aedit[{extra}]'")


def _needed(config: RunConfig) -> Iterator[str]:
    """Yield the extras that the configuration names."""
    yield from config.log
    if (config.prompts.source or config.data.source).startswith("hf:"):
        yield "datasets"
    if config.prompts.source:
        if config.prompts.source.startswith("gym:") or "gym" in config.reward.functions:
            yield "gym"
        if "math" in config.reward.functions:
            yield "math"
    if config.traces.endpoint:
        yield "otel"


def _buildable(config: RunConfig) -> Check:
    """Return the check of tokenizer and model, which it builds as a run does."""
    from aedit.launch.config import Placement
    from aedit.launch.processes import check_plan_fits, measure

    try:
        plan = measure(config, Placement())
        check_plan_fits(plan)
    except UserError as error:
        return "model", "fail", config.model.pretrained or config.model.family, str(error)
    return "model", "ok", f"{plan.num_params:,} parameters in {len(plan.units)} units, which fit here", ""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _required(name: str, fine: bool, found: str, advice: str = "") -> Check:
    return (name, "ok", found, "") if fine else (name, "fail", found, advice)


def _advised(name: str, fine: bool, found: str, advice: str) -> Check:
    return (name, "ok", found, "") if fine else (name, "warn", found, advice)


def _yes(there: bool) -> str:
    return "available" if there else "not available"
