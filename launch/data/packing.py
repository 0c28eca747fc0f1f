"""Write tokens of many documents as rows of equal length to a .npy file."""

import os
from typing import IO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import DTypeLike, NDArray


class RowWriter:
    """Writer that cuts a stream of tokens into rows of `width` in a .npy file.

    Holds one document in memory.
    """

    def __init__(self, file: IO[bytes], width: int, dtype: DTypeLike) -> None:
        self.num_rows = 0
        self._file = file
        self._width = width
        self._rest = np.empty(0, dtype=dtype)
        self._write_header()

    def append(self, tokens: NDArray[np.unsignedinteger]) -> None:
        """Append tokens to the stream; an incomplete row is kept until the next call."""
        stream = np.concatenate([self._rest, tokens.astype(self._rest.dtype, copy=False)])
        end = len(stream) - len(stream) % self._width
        self._file.write(stream[:end].tobytes())
        self._rest = stream[end:].copy()
        self.num_rows += end // self._width

    def finish(self) -> None:
        """Write the number of rows to the header. An incomplete last row is dropped."""
        self._file.seek(0)
        self._write_header()
        self._file.seek(0, os.SEEK_END)

    def _write_header(self) -> None:
        # NumPy pads headers so that the first axis can grow in place: both headers have the same length.
        descr = npy.dtype_to_descr(self._rest.dtype)
        shape = (self.num_rows, self._width)
        npy.write_array_header_1_0(self._file, {"descr": descr, "fortran_order": False, "shape": shape})
