"""What a model consists of and what a token costs it, by counting: parameters and floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from rheoscope.models.families import Family
from rheoscope.models.view import part
from rheoscope.surgery.features import FEATURES
from rheoscope.surgery.fused import attention_share, is_fused
from rheoscope.surgery.heads import layout_of
from rheoscope.surgery.reshape import has_attention


def parameters(model: nn.Module) -> int:
    """Numbers in all parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def attention_parameters(blocks: Sequence[nn.Module], family: Family) -> int:
    """Numbers in the projections of queries, keys, values and outputs; biases, and norms of q and k, included."""
    return sum(_attention_parameters(block, family) for block in blocks)


def _attention_parameters(block: nn.Module, family: Family) -> int:
    paths = dict.fromkeys((family.attn, family.o))
    modules = [part(block, path) for path in paths if _has(block, path)]
    inside = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    if not is_fused(block):
        return sum(parameter.numel() for parameter in inside.values())
    product = {id(parameter) for parameter in part(block, family.o).parameters()}
    beside = sum(parameter.numel() for key, parameter in inside.items() if key not in product)
    return beside + attention_share(block, family)


def flops_per_token(model: PreTrainedModel, blocks: Sequence[nn.Module], family: Family, *, length: int) -> int:
    """Floating-point operations of a forward pass of `length` tokens, per token: a product and a sum count as two.

    Every matrix once, the output head included, embeddings looked up left out; softmax attention with the mean number
    of keys (length + 1)/2, linear layers with their state. Norms, activations and exponentials are left out. Of a
    mixture all experts are counted.
    """
    matrices = sum(p.numel() for block in blocks for p in block.parameters() if p.dim() >= 2)
    head = model.get_output_embeddings()
    matrices += head.weight.numel() if head is not None else 0
    return 2 * matrices + sum(_mixing(block, family, length) for block in blocks)


def _mixing(block: nn.Module, family: Family, length: int) -> int:
    """Operations of one block that grow with heads: scores and weighted values, or updates and reads of a state."""
    if not has_attention(block, family):
        return 0
    layout = layout_of(block, family)
    state = getattr(layout.attention, "mixing", None)
    if state is not None:
        return 4 * layout.n_heads * layout.d_head * FEATURES[state.feature](torch.zeros(1, layout.d_head)).shape[-1]
    return 2 * layout.n_heads * layout.d_head * (length + 1)


def _has(block: nn.Module, path: str) -> bool:
    try:
        part(block, path)
    except AttributeError:
        return False
    return True
