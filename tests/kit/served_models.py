"""Directories of models that people serve: families and kinds of tokenizers, made from configurations."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

TEXT = [
    "The quick brown fox jumps over the lazy dog. " * 3,
    "def f(x):\n    return x ** 2  # square\n",
    "Caf\u00e9, na\u00efve, \u4e2d\u6587, \U0001f600 emoji and \u20ac 100.",
    "one two three four five six seven eight nine ten",
]
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 128}


def byte_level(vocabulary=400):
    """Return a byte-level BPE tokenizer, as of GPT-2 and Qwen: a character may take several tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXT, trainer)
    return made


def sentencepiece_like(vocabulary=400):
    """Return a BPE tokenizer with U+2581 for spaces, byte fallback and <s>, as of Llama 2 and Gemma."""
    trained = Tokenizer(models.BPE())
    trained.train_from_iterator(
        [text.replace(" ", "\u2581") for text in TEXT],
        trainers.BpeTrainer(vocab_size=vocabulary - 300, show_progress=False),
    )
    learned = json.loads(trained.to_str())["model"]
    fixed = ["<unk>", "<s>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: i for i, word in enumerate([*fixed, *learned["vocab"]])}
    merges = [tuple(pair) for pair in learned["merges"]]
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", *SPECIALS])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return made


def words(vocabulary=64):
    """Return a tokenizer of one word per token: t0, t1, ...."""
    made = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocabulary)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


def _llama(size, end):
    return LlamaConfig(
        vocab_size=size,
        intermediate_size=64,
        num_key_value_heads=2,
        eos_token_id=end,
        bos_token_id=None,
        **SIZES,
    )


def _qwen2(size, end):
    return Qwen2Config(
        vocab_size=size,
        intermediate_size=64,
        num_key_value_heads=2,
        eos_token_id=end,
        bos_token_id=None,
        **SIZES,
    )


def _gpt2(size, end):
    return GPT2Config(
        vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=128, eos_token_id=end, bos_token_id=end
    )


def _gemma2(size, end):
    ids = {"eos_token_id": end, "bos_token_id": 1, "pad_token_id": 0}
    own = {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 32}
    return Gemma2Config(vocab_size=size, **ids, **own, **SIZES)


KINDS = {
    "llama": (_llama, words, None),
    "qwen2": (_qwen2, byte_level, CHAT),
    "gpt2": (_gpt2, byte_level, None),
    "gemma2": (_gemma2, sentencepiece_like, CHAT),
}


def saved(kind, directory, *, seed=0, chat=None):
    """Write a model of a kind with its tokenizer, in fp32, and return the directory. chat: template of chats.

    The weights are random and loud enough that greedy answers do not repeat one token.
    """
    config_of, tokenizer_of, template = KINDS[kind]
    tokenizer = tokenizer_of()
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("<|end|>")
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=None if end is None else "<|end|>",
        bos_token="<s>" if tokenizer.token_to_id("<s>") is not None else None,
        additional_special_tokens=[] if end is None else SPECIALS[1:],
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat or template
    wrapped.save_pretrained(directory)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(size, end), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(directory)
    return directory


def saved_encoder_decoder(directory):
    """Write a T5, which is no causal language model."""
    PreTrainedTokenizerFast(tokenizer_object=words()).save_pretrained(directory)
    T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    ).save_pretrained(directory)
    return directory
