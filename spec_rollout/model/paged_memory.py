"""Memory of which only the pages that were written take real memory, and whose pages can be given back.

Keys and values need room for every row at its greatest length, but most rows are shorter. On Linux the room
is an anonymous mapping without a reservation of swap space: the operating system commits a page when it is
first written and takes it back on request. A page of 4 KiB is 16 tokens of one head of size 64 in float32.
"""

import mmap
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from aedit.spec_rollout.model.kv_spans import KVMemoryError

PAGE_BYTES = mmap.PAGESIZE
# The constant has a name since Python 3.12; its value depends on the processor.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


def padded_to_pages(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class PagedTensor:
    """A tensor of zeros on the CPU whose pages are committed when they are written.

    Elsewhere than on Linux and on a CPU it is an ordinary tensor, and `discard` has no effect.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._map: mmap.mmap | None = None
        num_bytes = prod(sizes) * dtype.itemsize
        with torch.inference_mode(False):  # inference tensors could not be written outside of that mode
            if device.type == "cpu" and sys.platform == "linux" and num_bytes:
                self._map = _mapping(num_bytes)
                self.tensor: Tensor = torch.frombuffer(self._map, dtype=dtype, count=prod(sizes)).view(*sizes)
            else:
                self.tensor = torch.zeros(*sizes, dtype=dtype, device=device)

    @property
    def is_sparse(self) -> bool:
        """Return true if pages that were not written take no memory."""
        return self._map is not None

    def discard(self, first: int, end: int) -> None:
        """Give back the whole pages within the bytes first .. end - 1. They read as zeros afterwards."""
        first, end = padded_to_pages(first), end // PAGE_BYTES * PAGE_BYTES
        if self._map is not None and first < end:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


def _mapping(num_bytes: int) -> mmap.mmap:
    """Return an anonymous mapping that reserves address space only.

    Raises:
        KVMemoryError: The operating system refuses it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        found = mmap.mmap(-1, padded_to_pages(num_bytes), flags=flags)
    except OSError as refusal:
        raise KVMemoryError(
            f"the system refuses {num_bytes / 2**30:.2f} GiB of address space for keys and values "
            f"({refusal}): lower rows or max_tokens, or raise the limit (ulimit -v, vm.overcommit_memory)"
        ) from refusal
    with suppress(OSError):  # a kernel without huge pages
        found.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would commit 2 MiB for one token
    return found
