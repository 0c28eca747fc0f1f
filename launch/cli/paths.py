"""Find the folder that an argument names, without importing torch, which takes seconds."""

from pathlib import Path

from aedit.launch.records import require_run
from aedit.launch.views import is_hub
from aedit.types import UserError

RUNS = Path("runs")


def policy_folder(place: str) -> Path:
    """Return the directory of the run or model that `place` names, here or in `runs`. Raises UserError."""
    for path in (Path(place), RUNS / place):
        if (path / "run.toml").is_file() or (path / "config.json").is_file():
            return path
    hint = "name one that has a run.toml or a config.json"
    raise UserError(f"{place}: no run and no model directory, here or in {RUNS}; {hint}")


def check_model_folder(place: str) -> None:
    """Raise UserError unless `place` is a model directory."""
    path = Path(place)
    if (path / "run.toml").is_file():
        raise UserError(f"{place}: a run, not a model directory: `aedit export {place} OUT`, then serve OUT")
    if not (path / "config.json").is_file():
        raise UserError(f"{place}: no model directory: it has no config.json")


def check_source(place: str) -> None:
    """Raise UserError unless `place` is a run directory, the folder of a hub, or HOST:PORT."""
    if not is_hub(place):
        require_run(Path(place))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
