"""Check the data before anything else is loaded: it exists, is readable and is long enough.

Reads at most the text of two samples, which takes a fraction of a second for any corpus.
"""

import codecs
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from aedit.launch.config import DataConfig
from aedit.launch.data.readers import TEXT_SUFFIXES, file_documents, matching_files
from aedit.types import UserError

_PROBE_BYTES = 65_536
_LOADERS = {"arrow", "csv", "json", "pandas", "parquet", "sql", "text", "webdataset", "xml"}
"""Names of file formats that `datasets` accepts in place of a data set."""


def check_data(config: DataConfig) -> None:
    """Raise UserError if `config.source` is missing, unreadable, of an unknown kind, or certainly too short.

    A dataset on the Hugging Face hub is checked when the run starts.
    """
    if config.source == "stdlib":
        return
    if config.source.startswith("hf:"):
        return _check_dataset(config)
    need, found = 2 * (config.seq_len + 1), 0
    for num_bytes in _sizes(matching_files(config.source), config.text_key):
        found += num_bytes
        if found >= need:
            return
    raise UserError(
        f"data.source = {config.source!r} has too little text: at most {found:,} tokens, and training and"
        f" evaluation need data.seq_len + 1 = {config.seq_len + 1} each; add text, or lower data.seq_len"
    )


def _check_dataset(config: DataConfig) -> None:
    _needs("datasets")
    name = config.source.removeprefix("hf:").partition(":")[0]
    if name in _LOADERS and not Path(name).exists():
        hint = "name the files themselves, as in data.source = 'texts/*.jsonl'"
        raise UserError(f"data.source = {config.source!r} names a file format, not a dataset; {hint}")


def _sizes(files: list[Path], text_key: str) -> Iterator[int]:
    """Yield the bytes of each file or document, which are an upper bound of its tokens."""
    for path in files:
        if not os.access(path, os.R_OK):
            raise UserError(f"data.source: cannot read {path}: Permission denied")
        match path.suffix.lower():
            case ".py":
                yield path.stat().st_size + 1  # in any encoding
            case suffix if suffix in TEXT_SUFFIXES:
                _check_utf8(path)
                yield path.stat().st_size + 1
            case ".parquet":
                _needs("pyarrow")
                yield path.stat().st_size  # compressed, with other columns: an estimate, not a bound
            case _:
                yield from (len(each.text.encode()) + 1 for each in file_documents([path], text_key))


def _check_utf8(path: Path) -> None:
    try:
        with path.open("rb") as file:
            codecs.getincrementaldecoder("utf-8")().decode(file.read(_PROBE_BYTES))
    except UnicodeDecodeError as error:
        raise UserError(f"data.source: {path} is not UTF-8 text ({error})") from error
    except OSError as error:
        raise UserError(f"data.source: cannot read {path}: {error.strerror}") from error


def _needs(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"data.source needs the package {module!r}: pip install 'aedit[datasets]'")
