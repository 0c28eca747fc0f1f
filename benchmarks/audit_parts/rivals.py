"""TOPLOC's proofs, and GRAIL's sketch restated, on the same claims.

TOPLOC (arXiv:2501.16007) is the package `toploc`, whose extension is compiled from its own sources if it does
not load with this torch. Its limits: 38 exponent mismatches, mean mantissa error 10, median 8, of 128 values.

GRAIL: the 16 largest values of the last hidden state of a place, in the order of their indices; of each the
bucket min(7, int(0.8 log2(|x| + 1))) with its sign; their dot product with r in [-127, 127]^16; accepted if
it differs by 6000 + 5 sqrt(place) at most, at 32 places. Nothing else of GRAIL is here.
"""

import hashlib
import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aedit.spec_rollout.audit import HeldRollout

DECODED_AT_ONCE, TOP = 32, 128
MAX_EXPONENTS, MAX_MEAN, MAX_MEDIAN = 38, 10.0, 8.0
PLACES, WIDTH = 32, 16

Hidden = Callable[[HeldRollout], Tensor]
"""Returns the last hidden states of the text of a claim, (T, d)."""


def hidden_of(model: nn.Module) -> Hidden:
    """Return a function that pushes a claim's text through this model once."""

    @torch.no_grad()
    def hidden(claim: HeldRollout) -> Tensor:
        tokens_1T = torch.tensor([[*claim.prompt, *claim.tokens]])
        found: Tensor = model.model(input_ids=tokens_1T).last_hidden_state[0]  # type: ignore[operator]
        return found

    return hidden


def random_hidden(scale: float, seed: int = 0) -> Hidden:
    """Return a function that makes states of noise."""

    def hidden(claim: HeldRollout) -> Tensor:
        generator = torch.Generator().manual_seed(1_000_003 * claim.key[0] + seed)
        return torch.randn(len(claim.prompt) + len(claim.tokens), 64, generator=generator) * scale

    return hidden


def constant_hidden(claim: HeldRollout) -> Tensor:
    """Return states of ones."""
    return torch.ones(len(claim.prompt) + len(claim.tokens), 64)


def toploc_or_why_not(build_at: Path) -> Any:
    """Return the package, or a text: why it is not here. Compile its extension in `build_at` if need be."""
    import torch.utils.cpp_extension as cpp

    spec = importlib.util.find_spec("toploc")
    if spec is None or spec.origin is None:
        return "toploc is not installed"
    try:
        return importlib.import_module("toploc")
    except ImportError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "toploc"]:
            del sys.modules[name]
    sources = Path(spec.origin).parent / "C" / "csrc"
    build_at.mkdir(parents=True, exist_ok=True)
    try:
        for name in ("utils", "ndd", "poly"):
            loaded = cpp.load(name, [str(sources / f"{name}.cpp")], build_directory=str(build_at))
            sys.modules[f"toploc.C.csrc.{name}"] = loaded
        return importlib.import_module("toploc")
    except (ImportError, OSError, RuntimeError) as error:
        return f"toploc does not compile here: {str(error).splitlines()[0]}"


def toploc_passes(toploc: Any, claim: HeldRollout, prover: Hidden, verifier: Hidden) -> bool:
    """Return whether TOPLOC accepts the proof of a prover's states."""
    mine, theirs = (_activations(hidden(claim), len(claim.prompt)) for hidden in (verifier, prover))
    proofs = toploc.build_proofs_bytes(theirs, DECODED_AT_ONCE, TOP, False)
    try:
        results = toploc.verify_proofs_bytes(mine, proofs, DECODED_AT_ONCE, TOP, False)
    except (RuntimeError, ValueError):
        return False
    return all(
        each.exp_mismatches <= MAX_EXPONENTS
        and each.mant_err_mean <= MAX_MEAN
        and each.mant_err_median <= MAX_MEDIAN
        for each in results
    )


def grail_passes(claim: HeldRollout, prover: Hidden, verifier: Hidden) -> bool:
    """Return whether the sketch accepts a prover's states."""
    seed = hashlib.sha256(f"{claim.key}".encode()).digest()
    numbers = np.frombuffer(hashlib.sha512(seed).digest(), dtype="<i2")[:WIDTH].astype(np.int64)
    r = np.abs(numbers) % 255 - 127
    mine, theirs = verifier(claim), prover(claim)
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    places = rng.choice(len(mine), size=min(PLACES, len(mine)), replace=False)
    return all(
        abs(_sketch(mine[place], r) - _sketch(theirs[place], r)) <= 6000 + 5 * math.sqrt(place)
        for place in places
    )


def _sketch(hidden_d: Tensor, r: "np.ndarray[Any, np.dtype[np.int64]]") -> int:
    chosen = hidden_d.abs().topk(WIDTH).indices.sort().values
    x = hidden_d[chosen].double().numpy()
    buckets = np.minimum(7, (0.8 * np.log2(np.abs(x) + 1)).astype(np.int64)) * np.sign(x).astype(np.int64)
    return int(buckets @ r)


def _activations(hidden_Td: Tensor, num_prompt: int) -> Sequence[Tensor]:
    """Return the states of the prompt, then of each token, in bfloat16."""
    found = hidden_Td.to(torch.bfloat16)
    return [found[:num_prompt], *found[num_prompt:].unbind(0)]
