"""Samples of vLLM behind the methods of an engine: `PYTHON_WITH_VLLM vllm_job.py FOLDER SPECULATIVE_AS_JSON`.

With a further argument, JSON of prices, it generates `prompts.json` at each price of a drafted token, with a
chooser and a clock of its own: see `choose`.

FOLDER has `config.json`, `1.safetensors` and `2.safetensors`, two versions of a policy, and `prompts.json`,
batches of prompts as `encode_prompt` writes them; and `layer.json` and `layer.safetensors`, the shape and
weights of a drafter that comes after the first batch, or neither; and `device`, the name of a device other
than the CPU. The last batch is generated while version 2 comes. Writes `answers.json`, and what came of
versions that do not fit.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from aedit.spec_rollout.choose import Goodput
from aedit.spec_rollout.drafters import layer_of
from aedit.spec_rollout.engine import Meters
from aedit.spec_rollout.sampling import decode_prompt
from aedit.spec_rollout.server.vllm_engine import make_vllm_engine
from aedit.spec_rollout.server.worker_engine import EngineSpec

STEPS = 3
"""Steps of the last batch before the second version comes."""
HARM = {
    "missing": lambda weights: weights.pop("model.norm.weight"),
    "shape": lambda weights: weights.update({"model.norm.weight": torch.ones(3)}),
    "nan": lambda weights: weights["model.norm.weight"].fill_(float("nan")),
    "dtype": lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"].half()}),
    "unknown": lambda weights: weights.update({"model.other": torch.ones(3)}),
}


def read_batches(folder):
    return [
        [decode_prompt(json.dumps(each)) for each in b]
        for b in json.loads((folder / "prompts.json").read_text())
    ]


def choose(folder, speculative, prices):
    """Write tokens, log-probabilities and arms at each price: a step costs 1 and the price of its drafts."""
    torch.set_num_threads(1)
    found = []
    model = json.loads((folder / "config.json").read_text())
    options = {"speculative": speculative, "choose": True}
    sizes = {"rows": 8, "max_tokens": 320, "arms": ("off",)}
    engine = make_vllm_engine(
        EngineSpec(model=model, dtype="float32", device="cpu", options=options, **sizes)
    )
    engine.update_weights(load_file(folder / "1.safetensors"), 1)
    step, now, price = engine._backend.step, [0.0], [0.0]

    def timed():
        outputs = step()
        now[0] += 1.0 + price[0] * engine._drafts.depth
        return outputs

    engine._backend.step, engine._cost_clock = timed, lambda: now[0]
    for price[0] in prices:
        engine._chooser, engine.meters = Goodput(engine._chooser.arms), Meters()
        batches = [finished(engine, batch) for batch in read_batches(folder)]
        status = engine.meters.status()
        found.append({"batches": batches, "arms": status["arms"], "tokens": status["accepted_length"]})
    (folder / "answers.json").write_text(json.dumps(found))


def main(folder, speculative):
    torch.set_num_threads(1)
    model = json.loads((folder / "config.json").read_text())
    batches = read_batches(folder)
    drafter = folder / "layer.json"
    shape = json.loads(drafter.read_text()) if drafter.exists() else None
    spec = EngineSpec(
        model=model,
        dtype="float32",
        device=(folder / "device").read_text() if (folder / "device").exists() else "cpu",
        rows=8,
        max_tokens=320,
        arms=("off",),
        drafter=shape,
        options={"speculative": speculative},
    )
    engine = make_vllm_engine(spec)
    first, second = (load_file(folder / f"{version}.safetensors") for version in (1, 2))
    engine.update_weights(first, 1)
    found = {}
    if shape:
        found["undrafted"] = finished(engine, batches[0])
        change_drafter(engine, load_file(folder / "layer.safetensors"))
    found["batches"] = [finished(engine, batch) for batch in batches[:-1]]
    found["refused"] = {name: refusal(engine, first, harm) for name, harm in HARM.items()}
    found["after"] = finished(engine, batches[0])
    rollouts = [engine.add(prompt) for prompt in batches[-1]]
    for _ in range(STEPS):
        engine.step()
    engine.abort(rollouts.pop())
    moved = engine.remove(rollouts.pop())
    engine.update_weights(second, 2)
    rollouts.append(engine.add(moved))
    found["batches"].append(finished(engine, [], rollouts))
    (folder / "answers.json").write_text(json.dumps(found))


def change_drafter(engine, state):
    """Let vLLM draft with a layer, after one that is refused."""
    drafter = engine.drafters["layer"]
    layers = [layer_of(drafter.shape) for _ in range(3)]
    for layer in layers:
        layer.load_state_dict(state)
    layers[1].gain.data.fill_(float("nan"))
    for version, layer in zip((-1, 1, 2), layers, strict=True):
        drafter.replace(layer, version)
    assert drafter.version == 2


def finished(engine, prompts, rollouts=()):
    """Return tokens, log-probabilities, versions, ends and passes of all samples, in order."""
    rollouts = [*rollouts, *(engine.add(prompt) for prompt in prompts)]
    while engine.running:
        engine.step()
    return [
        [*each.prompt.key, each.tokens, each.logprobs, each.versions, each.finish_reason, each.passes]
        for each in rollouts
    ]


def refusal(engine, weights, harm):
    """Return the error of a version that does not fit."""
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    harm(weights)
    try:
        engine.update_weights(weights, 9)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    if len(sys.argv) > 3:
        choose(*(Path(sys.argv[1]), *map(json.loads, sys.argv[2:])))
    else:
        main(Path(sys.argv[1]), json.loads(sys.argv[2]))
