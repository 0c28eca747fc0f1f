"""Jobs of tests/test_moving_kv.py: samples that move from rank 0 to rank 1."""

import time

import torch
import torch.distributed as dist
from kit.rollouts import Flips, tiny_policy

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.remote.rank_transfer import HEADER_WORDS, receive_sample, send_sample


def engine_of(rows=8, max_tokens=48):
    target = Target.of(tiny_policy(), rows=rows, max_tokens=max_tokens, nodes=4)
    return Engine(target, chooser=Flips("off"))


def ended(engine, made):
    list(engine.generate([]))
    return {(r.prompt.rollout, r.prompt.sample): r.tokens for r in made if r.finish_reason}


def begun(asked, steps=3):
    """Return an engine in the middle of its work and four samples of different rows taken out of it."""
    engine = engine_of()
    made = [engine.add(prompt) for prompt in asked]
    for _ in range(steps):
        engine.step()
    moving = [engine.remove(rollout, kv=True) for rollout in [*engine.running[:5:2], engine.running[1]]]
    return engine, made, moving


def num_kept(prompt):
    return len(prompt.tokens) + len(prompt.partial.tokens) - 1


def move(rank, size, asked, version=0, max_tokens=48):
    if rank == 0:
        engine, made, moving = begun(asked)
        sent = [send_sample(prompt, 1, timeout_s=30) for prompt in moving]
        made += [engine.add(prompt) for prompt, there in zip(moving, sent, strict=True) if not there]
        kept = sum(num_kept(prompt) for prompt, there in zip(moving, sent, strict=True) if there)
        return {"ended": ended(engine, made), "sent": sent, "kept": kept}
    engine = engine_of(max_tokens=max_tokens)
    engine.target.update_weights(engine.target.model.state_dict(), version)
    made = [made for _ in range(4) if (made := receive_sample(engine, 0, timeout_s=30))]
    told = ended(engine, made), engine.status()
    return {"ended": told[0], "carried": told[1]["restored_tokens"], "prefilled": told[1]["prefilled_tokens"]}


def fail(rank, size, asked, how):
    """Let rank 1 leave at once, leave in the middle of a sample, or stay and never answer, as `how` says."""
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if how == "gone after the text":
            header = torch.zeros(HEADER_WORDS, dtype=torch.int64)
            dist.recv(header, 0)
            dist.recv(torch.zeros(int(header[1]), dtype=torch.uint8), 0)
        if how == "silent":
            store.wait(["done"])
        return None
    engine, made, moving = begun(asked)
    began_s, error = time.monotonic(), ""
    try:
        send_sample(moving[0], 1, timeout_s=1.0 if how == "silent" else 30)
    except OSError as failed:
        error = str(failed)
    waited_s = time.monotonic() - began_s
    store.set("done", "1")
    made += [engine.add(prompt) for prompt in moving]
    return {"ended": ended(engine, made), "error": error, "waited_s": waited_s}
