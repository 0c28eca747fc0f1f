"""The corpus as arrays of samples on disk, packed once and read by every process."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from aedit.launch.config.config import DataConfig
from aedit.launch.data.corpus import documents, is_held_out, source_files
from aedit.launch.data.order import SampleOrder
from aedit.launch.data.packing import RowWriter
from aedit.launch.data.tokenizer import Tokenizer, token_dtype
from aedit.system import atomic_file
from aedit.types import UserError

__all__ = ["Corpus", "SampleOrder", "batch", "evaluation_indices", "load_corpus"]

_LAYOUT = 1
"""Goes up when packing changes, so that older caches are not read."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Tokens of all documents, an end-of-document token after each, cut into samples.

    Both arrays: (num_samples, seq_len + 1), read-only, memory-mapped if cached. They share no document.
    """

    train: NDArray[np.unsignedinteger]
    held_out: NDArray[np.unsignedinteger]


def load_corpus(config: DataConfig, tokenizer: Tokenizer, cache_dir: Path | None) -> Corpus:
    """The samples of `config.source`: from `cache_dir` if they are there, else packed (and kept there).

    Safe to call from several processes at once. Raises `UserError` for an unusable source or cache directory,
    and for too little text to fill one sample of each kind.
    """
    name = _cache_name(config, tokenizer)
    with _directory(cache_dir) as directory:
        train, held_out = directory / f"{name}.train.npy", directory / f"{name}.held_out.npy"
        if not (train.exists() and held_out.exists()):
            _pack(config, tokenizer, train, held_out)
        mode = None if cache_dir is None else "r"
        return Corpus(_load(train, mode), _load(held_out, mode))


def batch(samples: NDArray[np.unsignedinteger], indices: NDArray[np.int64]) -> torch.Tensor:
    """Samples `indices` as int64 of shape (len(indices), seq_len + 1), on CPU."""
    return torch.from_numpy(samples[indices].astype(np.int64))


def evaluation_indices(num_samples: int, k: int) -> NDArray[np.int64]:
    """At most k samples spread evenly over all documents, the same ones every time."""
    k = min(k, num_samples)
    return np.arange(k, dtype=np.int64) * num_samples // k


def _pack(config: DataConfig, tokenizer: Tokenizer, train: Path, held_out: Path) -> None:
    dtype, width = token_dtype(tokenizer.vocab_size), config.seq_len + 1
    eos = np.array([tokenizer.eos_id], dtype=dtype)
    try:
        with atomic_file(train) as train_file, atomic_file(held_out) as held_out_file:
            rows = {False: RowWriter(train_file, width, dtype), True: RowWriter(held_out_file, width, dtype)}
            for document in documents(config):
                side = rows[is_held_out(document, config.held_out)]
                side.append(tokenizer.encode(document.text))
                side.append(eos)
            for side in rows.values():
                side.finish()
            _check_enough(config, rows[False].num_rows, rows[True].num_rows)
    except OSError as error:
        raise UserError(f"cannot write the packed samples to {train.parent}: {error.strerror}") from error


def _check_enough(config: DataConfig, num_train: int, num_held_out: int) -> None:
    need = f"needs at least data.seq_len + 1 = {config.seq_len + 1} tokens"
    if not num_train:
        raise UserError(f"data.source = {config.source!r} has too little text: training {need}")
    if not num_held_out:
        hint = "raise data.held_out, add documents, or lower data.seq_len"
        share = f"data.held_out = {config.held_out}"
        raise UserError(f"{share} leaves too little text: evaluation {need}; {hint}")


def _cache_name(config: DataConfig, tokenizer: Tokenizer) -> str:
    stats = [_file_state(path) for path in source_files(config)]
    # The vocabulary is in the fingerprint; the name of the tokenizer is not, as it says where, not what.
    key = (_LAYOUT, config.source, config.text_key, config.split, config.seq_len, config.held_out)
    return sha256(repr((key, tokenizer.fingerprint, stats)).encode()).hexdigest()[:24]


def _file_state(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"data.source: cannot read {path}: {error.strerror}") from error
    return str(path.absolute()), stat.st_size, stat.st_mtime_ns


@contextmanager
def _directory(cache_dir: Path | None) -> Iterator[Path]:
    if cache_dir is None:
        with tempfile.TemporaryDirectory() as name:
            yield Path(name)
        return
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the cache directory {cache_dir}: {error.strerror}") from error
    yield cache_dir


def _load(path: Path, mode: str | None) -> NDArray[np.unsignedinteger]:
    samples: NDArray[np.unsignedinteger] = np.load(path, mmap_mode=mode)  # type: ignore[arg-type]
    samples.flags.writeable = False
    return samples
