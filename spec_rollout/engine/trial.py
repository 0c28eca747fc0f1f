"""Trial calls of objects that are given by import path, with the inputs of their place.

Each raises ValueError for what it finds wrong; errors of the object itself pass.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aedit.spec_rollout.choose import ArmChooser, EngineView, Fixed, StepObservation
from aedit.spec_rollout.drafters import OFF, Arm, Draft, Drafter, Noise, RowStart, StepUpdate
from aedit.spec_rollout.engine.engine import Engine
from aedit.spec_rollout.engine.meters import Meters
from aedit.spec_rollout.model import TargetModel
from aedit.spec_rollout.sampling import Prompt, Sampling

_TOKENS = 6
_CHAIN = Arm("custom", 2, 1, 2)


def try_drafter(drafter: Drafter, target: TargetModel) -> None:
    """Generate two samples of unequal lengths with `drafter`, and check the form of each draft."""
    rows = min(2, target.rows)
    checked = _CheckedDrafter(drafter, target)
    engine = Engine(target, drafters={"custom": checked}, chooser=Fixed(_CHAIN))
    lengths = [min(_TOKENS + 2 * row, target.max_tokens - 2) for row in range(rows)]  # the last row moves
    for row, length in enumerate(lengths):
        sampling = Sampling(max_new_tokens=max(1, length), temperature=float(row))
        engine.add(Prompt(tokens=(0,) * (1 + row), rollout=row, sample=0, sampling=sampling))
    while engine.running or engine.waiting:
        engine.step()
    if lengths[0] > 1 and not checked.num_drafts:
        raise ValueError("propose was never called")


def try_chooser(
    make: Callable[[Sequence[Arm]], ArmChooser], arms: Sequence[Arm], target: TargetModel
) -> None:
    """Let a chooser of its own choose and observe a few steps, so that the one in use has observed none."""
    chooser = make(arms)
    view = EngineView(rows=1, context=8, versions={arm.drafter: 0 for arm in arms})
    for _ in range(max(2, len(arms))):
        arm = chooser.choose(view)
        if not isinstance(arm, Arm):
            raise ValueError(f"choose returned {_kind(arm)}, expected Arm")
        if not view.has(arm):
            raise ValueError(
                f"choose returned {arm}, whose drafter is not there, expected off or one of {_names(arms)}"
            )
        tried = next(iter(arms), OFF) if arm.is_off else arm
        draft = None
        if not tried.is_off:
            draft = _plain_draft(tried, target)
            kept = chooser.trim(view, tried, draft)
            counts = kept if isinstance(kept, Sequence) else [kept]
            if len(counts) != 1 or type(counts[0]) is not int or counts[0] < 0:
                raise ValueError(
                    f"trim returned {kept!r}, expected an int from 0 to {draft.tokens_BN.shape[1]}, or one "
                    "for each row"
                )
        proposal = None if arm.is_off else draft
        chooser.learn(
            StepObservation(
                view=view,
                arm=arm,
                emitted=1,
                total_s=0.01,
                draft_s=0.001 if proposal else 0.0,
                nodes=arm.nodes,
                draft=proposal,
                accepted_B=(0,),
                path_Bm=None if arm.is_chain else [[0]],
            )
        )
        if rest := getattr(chooser, "rest", None):
            following = rest(view)
            if not isinstance(following, tuple) or [*map(type, following)] != [Arm, int]:
                raise ValueError(f"rest returned {following!r}, expected an Arm and a number of steps")


def try_engine(engine: object, *, rows: int, max_tokens: int) -> None:
    """Generate one token with the engine of a worker."""
    if not isinstance(engine, Engine):
        raise ValueError(f"returned {_kind(engine)}, expected Engine")
    found = engine.target.rows, engine.target.max_tokens
    if found[0] < rows or found[1] < max_tokens:
        raise ValueError(
            f"returned an engine for {found} rows and tokens, expected at least {(rows, max_tokens)}"
        )
    chooser, engine.chooser = engine.chooser, Fixed(OFF)  # it does not learn from this
    engine.add(Prompt(tokens=(0,), rollout=0, sample=0, sampling=Sampling(max_new_tokens=1)))
    while engine.running or engine.waiting:
        engine.step()
    engine.chooser, engine.meters = chooser, Meters()


class _CheckedDrafter:
    """The drafter, with its drafts checked."""

    def __init__(self, drafter: Drafter, target: TargetModel) -> None:
        self._drafter, self._target = drafter, target
        self.needs_features: bool = getattr(drafter, "needs_features", True)
        self.num_drafts = 0

    def begin(self, rows: Sequence[RowStart]) -> None:
        self._drafter.begin(rows)

    def update(self, update: StepUpdate) -> None:
        self._drafter.update(update)

    def move(self, source: int, target: int) -> None:
        self._drafter.move(source, target)

    def end(self, row: int) -> None:
        self._drafter.end(row)

    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        draft = self._drafter.propose(arm, rows, noise, temperature_B)
        self.num_drafts += 1
        _check_draft(draft, arm, rows, self._target)
        return draft


def _check_draft(draft: object, arm: Arm, rows: int, target: TargetModel) -> None:
    if not isinstance(draft, Draft):
        raise ValueError(f"propose returned {_kind(draft)}, expected Draft")
    num_nodes = draft.tokens_BN.shape[-1] if draft.tokens_BN.dim() else 0
    shape = (rows, num_nodes)
    for name, dtype, wanted in (
        ("tokens_BN", torch.int64, shape),
        ("scores_BN", torch.float32, shape),
        ("parents_BN", torch.int64, shape),
        ("counts_B", torch.int64, (rows,)),
        ("logq_BNV", torch.float32, (*shape, target.vocabulary)),
    ):
        x = getattr(draft, name)
        if x is None:
            continue
        found = (x.dtype, tuple(x.shape), x.device.type)
        if found != (dtype, wanted, target.device.type):
            raise ValueError(
                f"propose returned {name} of {found}, expected {(dtype, wanted, target.device.type)}"
            )
    if num_nodes > arm.nodes:
        raise ValueError(f"propose returned {num_nodes} nodes, expected at most {arm.nodes} for arm {arm}")
    if num_nodes and not 0 <= int(draft.tokens_BN.min()) <= int(draft.tokens_BN.max()) < target.vocabulary:
        raise ValueError(f"propose returned tokens outside of the vocabulary of {target.vocabulary}")
    if (
        draft.counts_B is not None
        and not 0 <= int(draft.counts_B.min()) <= int(draft.counts_B.max()) <= num_nodes
    ):
        raise ValueError(f"propose returned counts_B {draft.counts_B.tolist()}, expected 0 to {num_nodes}")
    nodes = torch.arange(num_nodes, device=target.device)
    if draft.parents_BN is not None and not ((draft.parents_BN < nodes) & (draft.parents_BN >= -1)).all():
        raise ValueError("propose returned parents_BN with a parent that does not precede its child")


def _plain_draft(arm: Arm, target: TargetModel) -> Draft:
    tokens = torch.zeros((1, arm.nodes), dtype=torch.int64, device=target.device)
    scores = -torch.arange(1.0, arm.nodes + 1, device=target.device)[None]
    parents = None if arm.is_chain else torch.arange(-1, arm.nodes - 1, device=target.device)[None]
    return Draft(tokens, parents, None, scores)


def _kind(value: object) -> str:
    return type(value).__name__


def _names(arms: Sequence[Arm]) -> str:
    return ", ".join(map(str, arms)) or "no arms"
