"""Freed memory that the C library keeps: fragments between tensors, which would grow with every batch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def hand_back() -> None:
    """Give what is free to the system, as far as the C library can be asked to (glibc); takes milliseconds."""
    if trim := _trim():
        trim(0)


@cache
def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library, or none that can be reached this way
        return None
