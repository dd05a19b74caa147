"""A model's logits a few rows at a time: whole they are the largest tensor of a forward pass, and are read once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rheoscope.corpus import Batch
from rheoscope.models.view import ModelView

PART_BYTES = {"cpu": 96 * 2**20}  # fewer rows at a time make the product slower: weights are read anew for each part
OTHER_BYTES = 256 * 2**20
SMALL = 512  # tokens whose logits fit a part: not worth the trial


def outputs(
    view: ModelView, batch: Batch, head: nn.Module | None
) -> Iterator[tuple[Float[Tensor, "part position vocabulary"], Batch]]:
    """The logits of a batch with the part of it that they belong to: all of it, or a stretch of one window.

    head: what `separate_head` gave; logits come whole where there is none, or where they are small. Stretches overlap
    by one position, since the logits at each stand for the token at the next.
    """
    n_windows, n_positions = batch.tokens.shape
    rows = max(2, _most_bytes(view) // (4 * head.weight.shape[0])) if head is not None else 0
    if head is None or n_windows * n_positions <= rows:
        yield view.forward(batch.tokens, batch.valid), batch
        return
    hidden = view.forward(batch.tokens, batch.valid, head=False)
    for window in range(n_windows):
        one = slice(window, window + 1)
        for first in range(0, max(1, n_positions - 1), rows - 1):
            places = slice(first, first + rows)
            yield (
                head(hidden[one, places]),
                replace(
                    batch,
                    tokens=batch.tokens[one, places],
                    valid=batch.valid[one, places],
                    documents=batch.documents[one],
                    windows=batch.windows[one],
                    first=first,
                ),
            )


@torch.no_grad()
def separate_head(view: ModelView) -> nn.Module | None:
    """The output head, where logits are what it makes of the last hidden state and nothing else, bit for bit.

    None where the model scales, caps or otherwise changes them, and where it has no head, or one whose logits are
    small. Tried on three tokens.
    """
    head = view.model.get_output_embeddings()
    if not view.has_head or not hasattr(head, "weight") or 4 * SMALL * head.weight.shape[0] <= _most_bytes(view):
        return None
    tokens = torch.arange(3, device=view.device)[None] % view.model.get_input_embeddings().weight.shape[0]
    whole, hidden = view.forward(tokens), view.forward(tokens, head=False)
    if hidden.shape[-1] != head.weight.shape[-1]:
        return None
    apart = head(hidden)
    return head if apart.dtype == whole.dtype and torch.equal(apart, whole) else None


def _most_bytes(view: ModelView) -> int:
    return PART_BYTES.get(view.device.type, OTHER_BYTES)
