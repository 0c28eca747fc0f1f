"""Serve another engine to `benchmarks.decode`, run by the Python of that engine's virtual environment.

    PYTHON decode_rival.py '{"name": "vllm", "directory": ..., "dtype": "fp32", "max_tokens": 4096, ...}'

It imports nothing of this repository. One JSON line per answer on stdout: first {"version"} or {"error"},
then, for each line {"prompts", "new"} on stdin, {"seconds", "tokens"} of one greedy batch.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Decode = Callable[[list[list[int]], int], list[list[int]]]


def ctranslate2(settings: dict[str, Any]) -> Decode:
    """Convert the saved model and return its decoder."""
    import ctranslate2 as ct2

    dtype = {"fp32": "float32", "bf16": "bfloat16"}[settings["dtype"]]
    if dtype not in (known := ct2.get_supported_compute_types("cpu")):
        raise RuntimeError(f"it has no {dtype} on this CPU, only {', '.join(sorted(known))}")
    converted = settings["directory"] + ".ctranslate2"
    ct2.converters.TransformersConverter(settings["directory"]).convert(
        converted, quantization=dtype, force=True
    )
    generator = ct2.Generator(converted, device="cpu", compute_type=dtype, inter_threads=1, intra_threads=1)

    def decode(prompts: list[list[int]], new: int) -> list[list[int]]:
        words = [[f"t{token}" for token in prompt] for prompt in prompts]
        done = generator.generate_batch(
            words,
            beam_size=1,
            sampling_topk=1,
            max_length=new,
            min_length=new,
            include_prompt_in_result=False,
        )
        return [list(each.sequences_ids[0]) for each in done]

    return decode


def vllm(settings: dict[str, Any]) -> Decode:
    """Load the saved model and return its decoder. Prefix caching is off: no text comes twice."""
    cores = sorted(os.sched_getaffinity(0))
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import torch
    from vllm import LLM, SamplingParams

    if settings["device"] == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("it is built for CPUs")
    # On a GPU the other systems keep their memory meanwhile.
    memory = {"gpu_memory_utilization": 0.3} if settings["device"] == "cuda" else {}
    engine = LLM(
        model=settings["directory"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[settings["dtype"]],
        max_model_len=settings["max_tokens"],
        max_num_seqs=settings["rows"],
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        **memory,
    )

    def decode(prompts: list[list[int]], new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = engine.generate(asked, sampling, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    return decode


ENGINES = {
    "ctranslate2": (ctranslate2, ("ctranslate2",)),
    "vllm": (vllm, ("vllm-cpu", "vllm")),
}


def main() -> None:
    settings = json.loads(sys.argv[1])
    # What libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**said: Any) -> None:
        answers.write(json.dumps(said) + "\n")

    make, packages = ENGINES[settings["name"]]
    try:
        decode = make(settings)
    except Exception as error:  # anything means that this system cannot be measured here
        answer(error=" ".join(f"{type(error).__name__}: {error}".split())[:300])
        return
    versions = []
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(importlib.metadata.version(package))
    answer(version=versions[0] if versions else "of unknown version")
    for line in sys.stdin:
        asked = json.loads(line)
        began_s = time.perf_counter()
        tokens = decode(asked["prompts"], asked["new"])
        answer(seconds=time.perf_counter() - began_s, tokens=tokens)


if __name__ == "__main__":
    main()
