"""Options of `aedit generate`, without importing torch, which takes seconds."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from aedit.launch.cli.arguments import Parser

SAMPLING: dict[str, tuple[type, str, float, str]] = {
    "temperature": (float, "T", 1.0, "0 is greedy (default 1)"),
    "top_k": (int, "K", 0, "sample from the K most likely tokens only"),
    "top_p": (float, "P", 1.0, "sample from the most likely tokens with total probability P"),
    "min_p": (float, "P", 0.0, "sample from tokens with at least P times the largest probability"),
    "repetition_penalty": (float, "R", 1.0, "above 1: tokens of prompt and answer get less likely"),
    "frequency_penalty": (float, "F", 0.0, "subtracted from a token's logit each time it was generated"),
    "presence_penalty": (float, "F", 0.0, "subtracted from the logits of generated tokens"),
    "top_logprobs": (int, "N", 0, "print each token's log-probability and those of the N best"),
}
"""Fields of `Sampling` that are options: type, metavar, default, help."""


def add_generate_options(parser: Parser) -> None:
    """Add the arguments of `aedit generate` to its parser."""
    parser.add_argument("place", metavar="RUN", help="a run, or a directory written by save_pretrained")
    add = parser.add_argument
    add("--prompt", metavar="TEXT", action="append", required=True, help="text to continue; repeatable")
    does = "tokens per sample (default 256, or the model's limit)"
    add("--max-new-tokens", metavar="N", type=int, help=does)
    for name, (kind, metavar, default, does) in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", metavar=metavar, type=kind, default=default, help=does)
    add("--samples", metavar="N", type=int, default=1, help="samples per prompt (default 1)")
    add("--seed", metavar="N", type=int, default=0, help="the same seed gives the same text")
    does = "auto, bandit, off, suffix:8, layer:4, layer:4x2x8 or module:Chooser"
    add("--arm", metavar="ARM", default="auto", help=does)
    does = "file or folder of a trained drafter, module:Drafter, or none (default: the model's own)"
    add("--drafter", metavar="FILE", type=Path, help=does)
    does = "generate again without speculation; print speed-up and equality"
    add("--compare", action="store_true", help=does)


def generate_request(options: Namespace) -> dict[str, Any]:
    """Return the options as fields of `GenerateRequest`."""
    names = ("samples", "max_new_tokens", "seed", "arm", "drafter")
    request = {name: getattr(options, name) for name in names}
    sampling = {name: getattr(options, name) for name in SAMPLING}
    return {"prompts": tuple(options.prompt), "sampling": sampling, **request}
