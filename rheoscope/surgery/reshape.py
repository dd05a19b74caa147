"""One layer changed in place: heads out of its projections, attention out of its block, gates into its weights.

Nothing here looks at numbers, so that an empty model is given the same shapes before its weights are read.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.models.families import Family, Residual
from rheoscope.models.view import part
from rheoscope.surgery.changes import LayerChange
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.fused import fuse, is_fused
from rheoscope.surgery.heads import Layout, in_out, keep_groups, layout_of, refuse_cut, rows_of, sizes
from rheoscope.surgery.mixing import Mixing
from rheoscope.surgery.modules import (
    NoAttention,
    OutputBias,
    ParallelBlock,
    TokenMap,
    WithTokenMaps,
    linear_of,
    mix_in,
    norm_of_stream,
    set_bias,
)
from rheoscope.surgery.shrink import shrink

# What the last projection of a feed-forward network is called, and the weights of experts that write.
LAST = ("down_proj", "c_proj", "fc2", "fc_out", "dense_4h_to_h", "lin2", "Wo")
EXPERTS, EXPERT_WEIGHTS = "experts", ("down_proj", "down_proj_bias")


@torch.no_grad()
def reshape(block: nn.Module, family: Family, change: LayerChange, config: object, name: str) -> None:
    """Change one block. config: of the original model. name: of the layer, for what is refused."""
    if is_fused(block):
        raise Refused(f"{name} asked to be edited; its parts were fused into two products: edit first, fuse last")
    if change.no_attention or change.gone:
        _change_heads(block, family, change, config, name)
    if change.rank is not None:
        if not has_attention(block, family):
            raise Refused(f"queries and keys of {name} asked to be narrower; no attention is left there: leave it out")
        shrink(layout_of(block, family), config, change.rank, name)
    if change.linear is not None:
        linearise(block, family, change.linear, name)
    if change.gate != 1.0:
        fold_gate(block, family, change.gate)
    if getattr(change.parallel, "fused", False):
        fuse(block, family, name)
    elif change.parallel is not None:
        parallelise(block, family, name)


def has_attention(block: nn.Module, family: Family) -> bool:
    """Whether a block still has attention."""
    return not isinstance(part(block, family.attn), NoAttention)


def _change_heads(block: nn.Module, family: Family, change: LayerChange, config: object, name: str) -> None:
    if not has_attention(block, family):
        if change.no_attention:
            return
        raise Refused(
            f"heads of {name} asked to be changed; an earlier edit has taken its attention away: leave it out"
        )
    layout = layout_of(block, family)
    gone = set(range(layout.n_heads)) if change.no_attention else change.gone
    kept = _kept_groups(layout, gone, name)
    if kept:
        refuse_cut(block, family)
    clip = getattr(config, family.clip) if family.clip else None
    token_map, beside = _token_map(layout, sorted(change.diagonal), clip)
    bias = _bias(layout, change.constants)
    maps = list(getattr(layout.attention, "token_maps", ()))
    if kept:
        keep_groups(layout, kept)
        set_bias(layout.o, bias)
    else:
        _remove(layout, bias, keep_o=bool(maps or token_map) and not layout.o_inside)
    if token_map is not None:
        maps.append(token_map)
    if beside is not None:
        _append_inputs(layout.o, beside, family)
    if maps:
        attention = part(block, family.attn)
        mix_in(attention, WithTokenMaps)
        attention.token_maps = nn.ModuleList(maps)


def _kept_groups(layout: Layout, gone: set[int], name: str) -> list[int]:
    """Key heads that some head still reads. Refused where only a part of a group goes."""
    wrong = sorted(head for head in gone if not 0 <= head < layout.n_heads)
    if wrong:
        raise RheoscopeError(f"head {wrong[0]} of {name} asked for; it has heads 0 to {layout.n_heads - 1}")
    kept = []
    for kv_head in range(layout.n_kv_heads):
        group = set(layout.group(kv_head))
        if not group & gone:
            kept.append(kv_head)
        elif not group <= gone:
            part_of = sorted(group & gone)
            if layout.n_kv_heads == 1:
                raise Refused(
                    f"heads {part_of} of {name} asked to be removed; all its heads read one key head (MQA), which "
                    "has to stay: drop all of them, or none"
                )
            raise Refused(
                f"heads {part_of} of {name} asked to be removed; they share key head {kv_head} with heads "
                f"{sorted(group - gone)}: remove those too, or none of the group"
            )
    return kept


def _bias(layout: Layout, constants: dict[int, tuple[float, ...]]) -> Float[Tensor, " d_model"] | None:
    """The output bias with what constant heads write added; None where there is none."""
    bias = getattr(layout.o, "bias", None)
    if not constants:
        return bias
    weight = in_out(layout.o, layout.family)
    total = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    total = total if bias is None else total + bias
    for head, constant in constants.items():
        if len(constant) != layout.d_head:
            raise RheoscopeError(f"a constant of {len(constant)} numbers given for a head of width {layout.d_head}")
        z = torch.tensor(constant, dtype=torch.float64, device=weight.device)
        total = total + z @ weight[layout.rows([head])].double()
    return total.to(weight.dtype)


def _remove(layout: Layout, bias: Tensor | None, *, keep_o: bool) -> None:
    """Take the attention module out of its block. keep_o: heads that are maps of tokens still write through it."""
    family, block = layout.family, layout.block
    d_model = sizes(layout.o, family)[1]
    output = OutputBias(d_model, bias)
    if layout.o_inside:
        block.set_submodule(family.attn, NoAttention(output))
        return
    block.set_submodule(family.attn, NoAttention(None))
    if not keep_o:
        block.set_submodule(family.o, output)
        return
    beside = in_out(layout.o, family)[layout.n_heads * layout.d_head :]
    block.set_submodule(family.o, linear_of(beside, bias))


def _token_map(
    layout: Layout, heads: list[int], clip: float | None
) -> tuple[TokenMap | None, Float[Tensor, "inputs d_model"] | None]:
    """Heads of whole groups as a map of tokens, and the weights of the output projection that are beside it (BERT)."""
    if not heads:
        return None, None
    kv_heads = sorted({head // layout.n_rep for head in heads})
    projection, rows = rows_of(layout, 2, kv_heads)
    index = torch.tensor(rows, device=projection.weight.device)
    bias = getattr(projection, "bias", None)
    v = linear_of(in_out(projection, layout.family)[:, index], bias if bias is None else bias[index])
    weight, chosen = in_out(layout.o, layout.family), set(heads)
    out = torch.cat(
        [
            torch.stack([weight[layout.rows([head])] for head in layout.group(kv_head) if head in chosen]).sum(0)
            for kv_head in kv_heads
        ]
    )
    if layout.o_inside:
        return TokenMap(v, linear_of(out, None), clip), None
    return TokenMap(v, None, clip), out


def _append_inputs(projection: nn.Module, added: Float[Tensor, "inputs outputs"], family: Family) -> None:
    """More inputs of a projection, after those it has."""
    dim = 0 if family.transposed else 1
    added = added if family.transposed else added.T
    projection.weight = nn.Parameter(torch.cat([projection.weight.detach(), added], dim))
    projection.in_features = projection.weight.shape[dim]


def linearise(block: nn.Module, family: Family, edit: Linearize, name: str) -> None:
    """Let the attention of a block mix by features."""
    if not has_attention(block, family):
        raise Refused(f"{name} asked to be made linear; an earlier edit has taken its attention away: leave it out")
    attention = part(block, family.attn)
    if hasattr(attention, "mixing"):
        raise Refused(f"{name} asked to be made linear; it is already: leave it out")
    attention.mixing = Mixing(edit.feature, scaled=edit.scaled)


def is_parallel(block: nn.Module, family: Family) -> bool:
    """Whether the feed-forward network of a block reads what attention reads, by its family or by an edit."""
    return family.residual is Residual.PARALLEL or isinstance(block, ParallelBlock)


def parallelise(block: nn.Module, family: Family, name: str) -> None:
    """Let the feed-forward network of a block read what attention reads."""
    if is_parallel(block, family):
        return
    if family.norm_ffn is None:
        raise Refused(
            f"{name} asked to be made parallel for good; its feed-forward network has no norm of its own before it, "
            "where the stream could be exchanged: leave it, or use the edit through taps"
        )
    mix_in(block, ParallelBlock)
    block.parallel_norm = family.norm_ffn
    norm = part(block, family.norm_ffn)
    norm.stream = None
    norm.register_forward_hook(norm_of_stream)


def fold_gate(block: nn.Module, family: Family, gate: float) -> None:
    """Multiply what the feed-forward network of a block writes, in the weights that write it."""
    if family.ffn_term is not None and family.ffn_term != family.ffn[-1]:
        norm = part(block, family.ffn_term)
        offset = 1.0 if family.unit_offset else 0.0
        norm.weight = nn.Parameter(gate * (norm.weight.detach() + offset) - offset)
        if getattr(norm, "bias", None) is not None:
            norm.bias = nn.Parameter(gate * norm.bias.detach())
        return
    last = part(block, family.ffn[-1])
    if not isinstance(getattr(last, "weight", None), Tensor):
        found = [name for name in (*LAST, EXPERTS) if hasattr(last, name)]
        if not found:
            raise Refused(f"a gate asked to be folded into {type(last).__name__}; its last weight is not known")
        last = getattr(last, found[0])
    names = ("weight", "bias") if isinstance(getattr(last, "weight", None), Tensor) else EXPERT_WEIGHTS
    for name in names:
        if isinstance(getattr(last, name, None), Tensor):
            setattr(last, name, nn.Parameter(gate * getattr(last, name).detach()))
