"""Where more snapshots are put than memory is meant to hold: a temporary file without a name."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref

import numpy as np
from jaxtyping import Float32, Int, Shaped

from rheoscope.errors import RheoscopeError


class Shelf:
    """Rows of float32 on disk, in the folder for temporary files; gone with the process, however it ends."""

    def __init__(self, n_rows: int, n_columns: int):
        self.shape = n_rows, n_columns
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - open as long as the shelf lives
        weakref.finalize(self, self.file.close)

    def __setitem__(self, rows: Int[np.ndarray, " row"], values: Float32[np.ndarray, "row column"]) -> None:
        try:
            for row, value in zip(rows.tolist(), values, strict=True):
                self.file.seek(row * self.shape[1] * 4)
                if self.file.write(np.ascontiguousarray(value, np.float32)) < self.shape[1] * 4:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a full disk takes a part
        except OSError as error:
            raise RheoscopeError(
                f"snapshots of fields cannot be written to {tempfile.gettempdir()} ({error.strerror}): make room, set "
                "TMPDIR to another folder, or keep only their leading directions (fields.disk_mib=0)"
            ) from error

    def __getitem__(self, rows: Shaped[np.ndarray, " row"]) -> Float32[np.ndarray, "row column"]:
        places = np.flatnonzero(rows) if rows.dtype == bool else rows
        found = np.empty((len(places), self.shape[1]), np.float32)
        for value, row in zip(found, places.tolist(), strict=True):
            self.file.seek(row * self.shape[1] * 4)
            self.file.readinto(memoryview(value).cast("B"))
        return found


def room() -> int:
    """Bytes that may be put on disk: half of what is free in the folder for temporary files."""
    return shutil.disk_usage(tempfile.gettempdir()).free // 2
