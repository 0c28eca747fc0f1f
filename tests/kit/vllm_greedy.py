"""Program for the interpreter of `.venv-vllm`: greedy texts of a directory, and the counts of its drafts.

Arguments: directory, JSON list of prompts (lists of tokens), tokens per text. Prints one JSON line.
"""

import json
import os
import sys

if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams

    place, prompts, num_tokens = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    llm = LLM(
        model=place,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        disable_log_stats=False,
        skip_tokenizer_init=True,
        async_scheduling=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    made = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    found = {
        "texts": [list(one.outputs[0].token_ids) for one in made],
        "drafts": counts["vllm:spec_decode_num_drafts"],
        "accepted": counts["vllm:spec_decode_num_accepted_tokens"],
    }
    print(json.dumps(found))
