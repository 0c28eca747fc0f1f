"""New weights from a directory in Hugging Face's form, and checksums of weights."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from aedit.system import check_folder, opened_below, read_index

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_weights(folder: str, root: Path | None, model: PreTrainedModel) -> Mapping[str, Tensor]:
    """Return the weights of a directory that `save_pretrained` wrote, by the names of the model's state_dict.

    Nothing is unpickled: files in PyTorch's own format are not read.

    Args:
        folder: The directory, as an absolute path or below `root`.
        root: Directories below it may be read; None: none.
        model: The model that they are for.

    Raises:
        ValueError: The directory may not be read, has no weights, or they do not fit the model or are not
            finite.
    """
    path, top = _allowed(folder, root)
    kind: Any = type(model)
    try:
        given = _tensors(path, top)
    except SafetensorError as error:
        raise ValueError(f"cannot be read: {error}") from error
    except OSError as error:
        raise ValueError(f"cannot be read: {Path(str(error.filename)).name}: {error.strerror}") from error
    try:
        loaded, found = kind.from_pretrained(
            None,  # no file is read by any name but those that were checked
            state_dict=given,
            config=model.config,
            generation_config=model.generation_config,  # weights alone need no file of it
            dtype=model.dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # weights of other kinds fail in many ways
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"cannot be read: {first}") from error
    wrong = [f"no weights for {name}" for name in sorted(found["missing_keys"])]
    wrong += [f"unknown weights {name}" for name in sorted(found["unexpected_keys"])]
    wrong += [
        f"{name} with shape {tuple(given)}, expected {tuple(own)}"
        for name, given, own in sorted(found["mismatched_keys"])
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ValueError(f"does not fit the served model: it has {wrong[0]}{more}")
    weights: dict[str, Tensor] = loaded.state_dict()
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"has values in {name} that are not finite")
    return weights


def _tensors(folder: Path, top: Path) -> dict[str, Tensor]:
    """Return the tensors in the files of a directory, which must lie below `top`."""
    whole, index = folder / WEIGHTS, folder / INDEX
    if not whole.exists() and not index.exists():
        raise ValueError(f"has no weights: {folder.name} must have the file {WEIGHTS} or {INDEX}")
    tensors: dict[str, Tensor] = {}
    for path in [whole] if whole.exists() else read_index(index, top):
        with opened_below(path, top) as opened:
            tensors.update(load_file(opened))
    return tensors


def _allowed(folder: str, root: Path | None) -> tuple[Path, Path]:
    """Return a directory below `root`, and `root`, all links followed."""
    if root is None:
        raise ValueError("cannot be read: the server was started without --weights-root")
    top = root.resolve()
    try:
        path = (top / folder).resolve()
        is_directory = path.is_dir()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ValueError(f"is no path: {reason}") from None
    if not path.is_relative_to(top) or path == top:
        raise ValueError("must be a directory below --weights-root of the server")
    if not is_directory:
        raise ValueError("is no directory at the server")
    check_folder(path, top)
    return path, top


def checksums(model: torch.nn.Module) -> dict[str, str]:
    """Return 32 hexadecimal digits of BLAKE2b over shape, dtype and bytes of each tensor of a model."""
    found = {}
    for name, tensor in model.state_dict().items():
        digest = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), digest_size=16)
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        found[name] = digest.hexdigest()
    return found
