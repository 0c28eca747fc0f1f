"""Rollouts through our vLLM engine beside vLLM's own `LLM.generate`, run by an interpreter that has vLLM.

    PYTHON vllm_race.py '{"vocabulary": 8192, "hidden": 512, "layers": 6, "dtype": "float32", ...}'

Its last line is JSON: per pair the CPU seconds of both and the plug-in's, and how near the texts are to those
of the own engine.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams

from aedit.spec_rollout import Engine, Prompt, Rollout, Sampling
from aedit.spec_rollout.drafters import OFF
from aedit.spec_rollout.server.vllm_engine import EngineSize, LocalVllm, ReferencePolicy, VllmEngine
from aedit.spec_rollout.vllm import coupled, register

PROMPT_TOKENS, MAX_TOKENS = 32, 256
_LLM: Any = LLM
_Params: Any = SamplingParams


class Clock:
    """Processor time inside the plug-in's methods."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        for name in ("apply", "scale", "update_state"):
            setattr(coupled.CoupledSampling, name, self._timed(getattr(coupled.CoupledSampling, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*inputs: Any) -> Any:
            began_s = time.process_time()
            made = method(*inputs)
            self.spent_s += time.process_time() - began_s
            return made

        return timed


def race(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of all pairs."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    register()
    vocabulary, hidden, rows = settings["vocabulary"], settings["hidden"], settings["rows"]
    dtype = getattr(torch, settings["dtype"])
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=settings["layers"],
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2 * MAX_TOKENS,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        llm = _LLM(
            model=folder,
            skip_tokenizer_init=True,
            load_format="aedit",
            dtype=settings["dtype"],
            max_model_len=MAX_TOKENS,
            max_num_seqs=rows,
            enforce_eager=True,
            kv_cache_memory_bytes=1 << 29,
            logprobs_mode="raw_logprobs",
            weight_transfer_config={"backend": "aedit"},
            async_scheduling=False,
            generation_config="vllm",
            disable_log_stats=True,
        )
    size = EngineSize(
        rows=rows, max_tokens=MAX_TOKENS, vocabulary=vocabulary, dtype=dtype, device=torch.device("cpu")
    )
    reference = ReferencePolicy(LlamaForCausalLM(config), dtype)
    engine = VllmEngine(LocalVllm(llm.llm_engine), size, reference, None, OFF)
    engine.update_weights(model.state_dict(), 1)
    texts = [[(7 * i + j) % vocabulary for j in range(PROMPT_TOKENS)] for i in range(rows)]
    sampling = Sampling(max_new_tokens=settings["new"])
    clock = Clock()

    def prompts(rollout: int) -> list[Prompt]:
        return [
            Prompt(tokens=tuple(text), rollout=rollout, sample=i, sampling=sampling)
            for i, text in enumerate(texts)
        ]

    def ours(rollout: int) -> list[Rollout]:
        rollouts = [engine.add(prompt) for prompt in prompts(rollout)]
        while engine.running:
            engine.step()
        return rollouts

    def theirs(_: int) -> None:
        params = _Params(
            temperature=1.0, max_tokens=settings["new"], ignore_eos=True, logprobs=0, detokenize=False
        )
        llm.generate([{"prompt_token_ids": text} for text in texts], params, use_tqdm=False)

    ours(0)
    theirs(0)
    pairs: list[dict[str, float]] = []
    for number in range(1, settings["pairs"] + 1):
        pair: dict[str, float] = {}
        for name, run in [("ours", ours), ("theirs", theirs)][:: 1 if number % 2 else -1]:
            clock.spent_s, began_s = 0.0, time.process_time()
            run(number)
            pair[name] = time.process_time() - began_s
            if name == "ours":
                pair["plug_in"] = clock.spent_s
        pairs.append(pair)
    own = Engine.of(model, rows=rows, max_tokens=MAX_TOKENS).generate(prompts(1))
    parameters = sum(each.numel() for each in model.parameters())
    return {"parameters": parameters, "pairs": pairs, **nearness(ours(1), own)}


def nearness(found: Iterable[Rollout], own: Iterable[Rollout]) -> dict[str, Any]:
    """Return how many texts of one engine fork from the other's, and the differences up to the forks."""
    by_key = {rollout.prompt.key: rollout for rollout in own}
    forks, num_texts, gaps = 0, 0, [0.0]
    for each in found:
        other = by_key[each.prompt.key]
        num_texts += 1
        forks += each.tokens != other.tokens
        for a, b, x, y in zip(each.tokens, other.tokens, each.logprobs, other.logprobs, strict=True):
            if a != b:
                break
            gaps.append(abs(x - y))
    return {"texts": num_texts, "forks": forks, "mean_gap": sum(gaps) / len(gaps), "worst_gap": max(gaps)}


if __name__ == "__main__":
    print(json.dumps(race(json.loads(sys.argv[1]))))
