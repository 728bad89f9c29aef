"""Rows scattered over buckets of their key hash in one unnamed temporary file, which the system removes whatever happens.

Memory is one file offset per bucket: the pieces of a bucket are a chain, each pointing to the one before. Hashes stand apart from the
other columns, so that repeated ids are found without decoding rows. Not durable, not shared: of one process, for one pass.
"""

import io
import os
import struct
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, Self

import numpy as np
import polars as pl

HASH_COLUMN: Final = "key_hash"
_HEADER: Final = struct.Struct("<qqq")  # offset of the piece before (-1: none), rows, bytes of the other columns
_NONE: Final = -1


class Spill:
    """`lows`: smallest hash of each bucket, ascending; the first bucket also takes what is smaller."""

    def __init__(self, folder: Path, lows: Sequence[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  closed by close()
        self._lows = pl.Series(lows, dtype=pl.Int64)
        self._last = [_NONE] * len(lows)
        self._end = 0
        self.rows = [0] * len(lows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, frame: pl.DataFrame) -> None:
        """Rows sorted by `key_hash`; all frames have the same columns."""
        starts = [0, *frame[HASH_COLUMN].search_sorted(self._lows[1:], side="left"), frame.height]
        for bucket, (start, end) in enumerate(pairwise(starts)):
            if end > start:
                self._append(bucket, frame.slice(start, end - start))

    def frames(self, bucket: int) -> Iterator[pl.DataFrame]:
        """The pieces of one bucket, each sorted by `key_hash`, the last one added first."""
        for rows, size, offset in self._pieces(bucket):
            hashes = pl.Series(HASH_COLUMN, np.frombuffer(self._read(8 * rows, offset), dtype=np.int64))
            yield pl.read_ipc(io.BytesIO(self._read(size, offset + 8 * rows))).with_columns(hashes)

    def hashes(self, bucket: int) -> pl.Series:
        """All key hashes of one bucket, in no order."""
        pieces = [np.frombuffer(self._read(8 * rows, offset), dtype=np.int64) for rows, _, offset in self._pieces(bucket)]
        return pl.Series(HASH_COLUMN, np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int64))

    def _append(self, bucket: int, frame: pl.DataFrame) -> None:
        buffer = io.BytesIO()
        frame.drop(HASH_COLUMN).write_ipc(buffer, compression="lz4")
        columns = buffer.getbuffer()
        hashes = frame[HASH_COLUMN].to_numpy().tobytes()
        piece = b"".join((_HEADER.pack(self._last[bucket], frame.height, len(columns)), hashes, columns))
        left = memoryview(piece)
        while left:
            left = left[self._file.write(left) :]
        self._last[bucket] = self._end
        self._end += len(piece)
        self.rows[bucket] += frame.height

    def _pieces(self, bucket: int) -> Iterator[tuple[int, int, int]]:
        at = self._last[bucket]
        while at != _NONE:
            before, rows, size = _HEADER.unpack(self._read(_HEADER.size, at))
            yield rows, size, at + _HEADER.size
            at = before

    def _read(self, size: int, offset: int) -> bytes:
        data = os.pread(self._file.fileno(), size, offset)
        while len(data) < size:
            more = os.pread(self._file.fileno(), size - len(data), offset + len(data))
            assert more, f"the spill file ends at {offset + len(data)}, {size - len(data)} bytes before its index says"
            data += more
        return data
