"""A tiny policy with a byte-level tokenizer, served over HTTP in this process."""

import json
import urllib.error
import urllib.request
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.http import HttpServer, HttpService, TextCodec, make_app
from aedit.spec_rollout.server import EngineHost

MAX_TOKENS = 128
TEXT = (
    "the quick brown fox jumps over the lazy dog. 1 2 3 4 5 one two three four five \u00e9\u00fc\u20ac " * 4
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | length }}\n{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer():
    """Return a byte-level tokenizer with a few merges, an end token and a chat template."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator([TEXT], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def text_policy(tokenizer, seed=0, dtype=torch.float32):
    """Return a random policy over the tokens of a tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@contextmanager
def served(model, tokenizer, *, rows=4, limits=None, host_limits=None, **options):
    """Serve a model; yield its `HttpService` and the address of the server."""
    host = EngineHost(host_limits)
    engine = Engine.of(model, rows=rows, max_tokens=MAX_TOKENS, tokenizer=tokenizer)
    host.open("model", lambda: engine, **{k: options.pop(k) for k in ("between_steps",) if k in options})
    more = {} if limits is None else {"limits": limits}
    service = HttpService(
        host=host,
        line="model",
        codec=TextCodec(tokenizer),
        model="tiny",
        eos=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
        **more,
    )
    service.metrics.follow(host.status)
    server = HttpServer(make_app(service, **options), "127.0.0.1", 0, limits)
    try:
        yield service, server.address
    finally:
        server.close()
        host.close()


def ask(address, path, body=None, method=None, headers=()):
    """Return status, headers and JSON value of a request."""
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{address}{path}", data, dict(headers), method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, _value(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, _value(error.read())


def _value(text):
    return json.loads(text) if text[:1] in (b"{", b"[") else text


def post(text, path="/v1/completions"):
    """Return the bytes of a POST request."""
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text
