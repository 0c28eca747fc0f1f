"""Race of servers of one model: all take turns at the same load on the same cores."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

from benchmarks.serve_parts.generator import Generator
from benchmarks.serve_parts.load import Load, Seen, prompt_of
from benchmarks.serve_parts.servers import Server

COMPARED_TOKENS = 16
"""Tokens of each greedy answer that is compared."""
Say = Callable[[str], None]
_auto: Any = AutoModelForCausalLM  # its methods carry no types


@dataclass(slots=True)
class Turns:
    """What the clients saw of one server at one number of clients, by turn."""

    seen: list[Seen] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Return the tokens per second of each turn."""
        return [each.tokens / each.seconds for each in self.seen]

    def all_of(self, name: str) -> list[float]:
        """Return `first_s` or `gaps_s` of all turns."""
        return [value for each in self.seen for value in getattr(each, name)]


@contextmanager
def only(server: Server, servers: Sequence[Server]) -> Iterator[None]:
    """Stop all servers but one."""
    for each in servers:
        (each.go_on if each is server else each.stop)()
    try:
        yield
    finally:
        for each in servers:
            each.go_on()


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Plan of a race."""

    clients: tuple[int, ...]
    repeats: int
    load: Load
    warm_up_s: float


def race(servers: Sequence[Server], clients: Generator, plan: Race, say: Say) -> dict[tuple[str, int], Turns]:
    """Return the turns by name of the server and number of clients. Each turn begins with another server."""
    found: dict[tuple[str, int], Turns] = {}
    for count in plan.clients:
        for repeat in range(-1, plan.repeats):  # the first turn warms up, and is not counted
            order = [*servers[repeat % len(servers) :], *servers[: repeat % len(servers)]]
            for server in order:
                load = replace(
                    plan.load, url=server.url, model=server.model, clients=count, seed=1000 * count + repeat
                )
                load = replace(load, leaves=True)
                if repeat < 0:
                    load = replace(load, seconds=plan.warm_up_s)
                with only(server, servers):
                    seen = clients.load(load)
                    greedy_of(server, [prompt_of(load, 0, 0)], 1)  # answers that were left have ended then
                if repeat >= 0:
                    found.setdefault((server.name, count), Turns()).seen.append(seen)
                    say(f"{count} clients, {server.name}: {seen.tokens / seen.seconds:.1f} tokens/s")
    return found


# --- the same tokens


def greedy_of(server: Server, prompts: Sequence[str], num_tokens: int) -> list[str]:
    """Return the server's greedy answers."""
    answers = []
    for prompt in prompts:
        body = {"model": server.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
        told = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
        answers.append(" ".join(told["choices"][0]["text"].split()))
    return answers


def greedy_of_transformers(directory: str, prompts: Sequence[str], num_tokens: int) -> list[str]:
    """Return the greedy answers of `transformers.generate`."""
    torch.set_num_threads(1)  # threads that wait for each other take very long on a busy machine
    model = _auto.from_pretrained(directory, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([[int(word.removeprefix("t")) for word in prompt.split()]])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        answers.append(" ".join(f"t{token}" for token in made[0, ids.shape[1] :].tolist()))
    return answers


def same_answers(
    servers: Sequence[Server], load: Load, directory: str, num_prompts: int
) -> Mapping[str, tuple[int, int]]:
    """Return for each server how many of its greedy answers equal those of `generate`, and of how many."""
    prompts = [prompt_of(load, 0, number) for number in range(num_prompts)]
    num_tokens = min(load.max_tokens, COMPARED_TOKENS)
    wanted = greedy_of_transformers(directory, prompts, num_tokens)
    found = {}
    for server in servers:
        with only(server, servers):
            got = greedy_of(server, prompts, num_tokens)
        found[server.name] = sum(a == b for a, b in zip(got, wanted, strict=True)), len(wanted)
    return found
