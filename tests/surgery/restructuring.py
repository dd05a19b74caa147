"""One edit of every kind for a tiny model, and both ways to make it: through taps and as modules."""

import torch

from rheoscope.models.precision import Float64Throughout
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import edited
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import ConstantHeads, DiagonalHeads, DropHeads
from rheoscope.surgery.edits_steering import GateFFN
from rheoscope.surgery.edits_structure import DropAttention, Parallelize, ShrinkHeads
from rheoscope.surgery.restructure import restructured
from tests.tiny import VARIANTS, input_ids, tiny


def group(view, layer=1):
    """The heads of a layer that read its first key head."""
    return tuple((layer, head) for head in range(view.n_heads // view.n_kv_heads))


def all_heads(view, layer):
    return tuple((layer, head) for head in range(view.n_heads))


def constants(view, heads):
    return tuple(tuple(0.1 * k - 0.03 * i for i in range(view.d_value)) for k, _ in enumerate(heads))


EXAMPLES = {
    "drop": lambda view: [DropHeads(heads=group(view))],
    "drop a layer": lambda view: [DropHeads(heads=all_heads(view, 0))],
    "constant": lambda view: [ConstantHeads(heads=group(view), constants=constants(view, group(view)))],
    "diagonal": lambda view: [DiagonalHeads(heads=group(view))],
    "diagonal layer": lambda view: [DiagonalHeads(heads=all_heads(view, 2))],
    "no attention": lambda view: [DropAttention(layers=(0, 2))],
    "linear": lambda view: [Linearize(layers=(1,))],
    "linear, softmax features": lambda view: [Linearize(layers=(0, 1), feature="softmax", scaled=True)],
    "linear, taylor": lambda view: [Linearize(layers=(1,), feature="taylor")],
    "parallel": lambda view: [Parallelize(layers=(0, 2))],
    "fused": lambda view: [Parallelize(layers=(0, 1), fused=True)],
    "gate": lambda view: [GateFFN(layers=(0, 2), gates=(0.3, -1.4))],
    "shrink": lambda view: [ShrinkHeads(layers=(0, 1), rank=4)],
    "all at once": lambda view: [
        DropHeads(heads=group(view)),
        DiagonalHeads(heads=all_heads(view, 0)),
        ShrinkHeads(layers=(2,), rank=2),
        Parallelize(layers=(1,)),
        GateFFN(layers=(1,), gates=(0.5,)),
    ],
}
# What cannot be kept though a tap can do it, and the sentence that says why.
FUSED = {"llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "smollm3"}
KEPT_NOWHERE = {
    "olmo2": {"drop": "over all heads", "constant": "over all heads", "diagonal": "over all heads"}
    | {"parallel": "no norm of its own", "all at once": "a norm over all coordinates"},
}


def refused_for(name, example, view):
    """Part of the sentence with which an example is refused for a variant; empty where it is not."""
    family = VARIANTS[name].family
    heads, linear = example in ("drop", "constant", "diagonal", "all at once"), example.startswith("linear")
    found = KEPT_NOWHERE.get(family, {}).get(example, "")
    if linear and not view.causal:
        return "reads both ways"
    if linear and (view.windows[1] or (example.endswith("features") and view.windows[0])):
        return "a window of"
    if linear and family == "gpt_oss":
        return "learned sinks"
    if (example == "shrink" or example == "all at once") and view.family.q_norm:
        return "a norm over all coordinates"
    if example in ("parallel", "fused", "all at once") and view.family.residual.name == "POST_NORM":
        return "norms the stream between"
    if example == "fused" and family not in FUSED:
        return "parallel and fused"
    return found if found and (heads or found) else ""


def logits_by_taps(view, edits, tokens=None):
    tokens = input_ids(view.model) if tokens is None else tokens
    with torch.no_grad(), Float64Throughout(), edited(view, *edits):
        return view.forward(tokens)


def view_of_modules(view, edits):
    with Float64Throughout():
        return ModelView(restructured(view, edits), view.tokenizer)


def logits_of(view, tokens=None):
    tokens = input_ids(view.inner) if tokens is None else tokens
    with torch.no_grad(), Float64Throughout():
        return view.forward(tokens)


def single(name):
    """A view of a tiny model in float32, as users have them."""
    return ModelView(tiny(name, dtype=torch.float32))


def mixed_edits(view):
    """Layer 0 without attention, layer 1 with fewer heads, layer 2 linear."""
    return [DropAttention(layers=(0,)), DropHeads(heads=group(view)), Linearize(layers=(2,))]
