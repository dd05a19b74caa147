"""Which keys a query may see in a text of n tokens: all, those up to itself, or those nearer than a sliding window."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int64


def visible_keys(n: int, *, causal: bool, width: int | None = None) -> Int64[np.ndarray, "2 query"]:
    """First key that each query sees, and the one after the last.

    width: of a sliding window, as transformers hands it to attention: keys at a distance of less, on the side or sides
    that the model sees.
    """
    query = np.arange(n)
    reach = n if width is None else width
    first = np.maximum(query - reach + 1, 0)
    return np.stack([first, query + 1 if causal else np.minimum(query + reach, n)])
