"""POST /inference/v1/generate: tokens in, tokens out, with the policy version of each token."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aedit.spec_rollout.engine.scoring import Scoring
from aedit.spec_rollout.sampling.samples import Rollout
from aedit.spec_rollout.service.http.answers import usage
from aedit.spec_rollout.service.http.bodies import json_body
from aedit.spec_rollout.service.http.common_fields import read_key_fields
from aedit.spec_rollout.service.http.completions import DEFAULT_TOKENS
from aedit.spec_rollout.service.http.fields import Fields
from aedit.spec_rollout.service.http.generation import Call, Generation
from aedit.spec_rollout.service.http.logprobs import finite
from aedit.spec_rollout.service.http.noise_keys import noise_keys
from aedit.spec_rollout.service.http.sampling_fields import BIGGEST, read_sampling
from aedit.spec_rollout.service.http.service import Service


async def generate(request: Request) -> Response:
    """Answer a request."""
    service: Service = request.app.state.service
    async with json_body(request, service) as body:
        call, logprobs, request_id = read_generate(body, service, request)
    generation = Generation(service, call)
    generation.start()
    await generation.finish(request.receive)
    choices = [_choice(i, generation.rollout(i), logprobs) for i in range(call.num_samples)]
    scores = generation.scores
    return JSONResponse(
        {
            "request_id": request_id,
            "choices": choices,
            "prompt_logprobs": _prompt_logprobs(scores[0]) if scores else None,
            "usage": usage(len(call.prompts[0]), sum(len(choice["token_ids"]) for choice in choices)),
        }
    )


def read_generate(body: Any, service: Service, request: Request) -> tuple[Call, int | None, str]:
    """Return the call of a body, the number of alternatives (None: no log-probabilities), and the id.

    Raises:
        ApiError: A parameter is not valid.
    """
    fields, limits = Fields(body), service.limits
    service.check_model(fields)
    found = fields.any("token_ids")
    tokens = fields.tokens("token_ids", found)
    given = fields.any("sampling_params")
    settings = Fields({} if given is None else given, "sampling_params")
    n = settings.integer("n", 1, 1, limits.max_samples)
    logprobs = settings.integer("logprobs", None, 0, limits.max_logprobs)
    prompt_logprobs = settings.integer("prompt_logprobs", None, 0, limits.max_logprobs)
    num_new = settings.integer("max_tokens", DEFAULT_TOKENS, 1, BIGGEST)
    sampling = read_sampling(
        settings, limits, service.eos, max_new_tokens=num_new, top_logprobs=logprobs or 0
    )
    _, request_id = read_key_fields(fields, request)
    seed = settings.integer("seed", None, -(1 << 63), (1 << 64) - 1)
    settings.ignore("skip_special_tokens", "spaces_between_special_tokens")  # there is no text
    settings.ignore("include_stop_str_in_output", "detokenize", "output_kind")
    settings.finish()
    fields.allow("stream", False)
    fields.allow("priority", 0)
    fields.ignore("cache_salt", "return_token_ids")
    fields.finish()
    keys = noise_keys([tokens], n, seed=seed, request_id=request_id)
    call = Call(
        prompts=(tokens,),
        sampling=sampling,
        n=n,
        keys=keys,
        prompt_logprobs=prompt_logprobs,
        request_id=request_id,
    )
    return call, logprobs, request_id


def weight_versions(versions: list[int]) -> list[dict[str, Any]]:
    """Return half-open spans of the tokens of an answer that one policy version has drawn."""
    spans: list[dict[str, Any]] = []
    for place, version in enumerate(versions):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": place, "end": place})
        spans[-1]["end"] = place + 1
    return spans


def _choice(i: int, rollout: Rollout, logprobs: int | None) -> dict[str, Any]:
    shown = None
    if logprobs is not None:
        content = []
        for place, (token, logprob) in enumerate(zip(rollout.tokens, rollout.logprobs, strict=True)):
            top = rollout.top_logprobs[place] if rollout.top_logprobs else ()
            content.append({**_entry(token, logprob), "top_logprobs": [_entry(*pair) for pair in top]})
        shown = {"content": content}
    return {
        "index": i,
        "finish_reason": rollout.finish_reason,
        "token_ids": rollout.tokens,
        "logprobs": shown,
        "weight_versions": weight_versions(rollout.versions),
    }


def _entry(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "token_id": token, "logprob": finite(logprob)}


def _prompt_logprobs(scores: Scoring) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of the prompt by token id, with its alternatives; null for the first."""
    shown: list[dict[str, Any] | None] = []
    for token, logprob, top in zip(scores.tokens, scores.logprobs, scores.top_logprobs, strict=True):
        if logprob is None:
            shown.append(None)
        else:
            entries = {**dict(top), token: logprob}
            shown.append({str(other): {"logprob": finite(value)} for other, value in entries.items()})
    return shown
