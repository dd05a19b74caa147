"""Wins loss back after a cut, in closed form: the output projection of every cut layer is fitted anew.

    fits = refit(view, edits, calibration)
    with edited(view, *edits), refitted(view, fits):
        ...

Layer by layer, in order: inputs are what the edited model, with the layers before already refitted, hands to W_O;
targets are what W_O gave in the original model for the same tokens, given the original stream. So a layer is asked to
write what it wrote before any cut, whatever the cuts before it have done to the stream that it reads: errors do not
pile up. With `target="stream"` it is asked to mend the stream as well: what it wrote, plus what the stream lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor, nn

from rheoscope.corpus import Corpus
from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.engine import Progress, batch_size_for, silent
from rheoscope.models.families import Residual
from rheoscope.models.taps import ATTENTION_SITES
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_sinks import ConstantHeads
from rheoscope.surgery.ridge import Moments, chosen_ridge
from rheoscope.surgery.streams import Rows, Streams, output_projection

TARGETS = ("output", "stream")
HELD_OUT = 4  # every so many-th batch decides on the strength of the ridge
N_CALIBRATION = 32  # windows; more than 10,000 tokens for some thousand weights of each output


@dataclass(frozen=True, eq=False)
class LayerFit:
    """What the output projection of one layer becomes: x @ weight + bias.

    strength: of the ridge. Errors: Σ‖y - ŷ‖² / Σ‖y - mean y‖² on held-out windows, with the weights as they were and
    with those fitted on the other windows.
    """

    layer: int
    weight: Float[Tensor, "inputs d_model"] = field(repr=False)
    bias: Float[Tensor, " d_model"] | None = field(repr=False)
    strength: float
    error_before: float
    error_after: float


def refit(
    view: ModelView,
    edits: Sequence[Edit],
    calibration: Corpus,
    *,
    target: str = "output",
    with_bias: bool = True,
    batch_size: int | None = None,
    progress: Progress = silent,
) -> tuple[LayerFit, ...]:
    """Output projections of all cut layers, fitted on a text in two passes. The model is as it was afterwards.

    with_bias: the bias is fitted as well where the layer has one, or constant heads make one. Holds three times
    tokens x d_model numbers and the second moments of one layer. Raises RheoscopeError for a text of one window: there
    would be none to hold out.
    """
    layers = cut_layers(view, edits)
    if layers:
        _refuse(view, calibration, target)
    size = min(batch_size or batch_size_for(view, calibration.window), -(-calibration.n_windows // HELD_OUT))
    before = Streams(view, calibration, batch_size=size)
    after = Streams(view, calibration, batch_size=size, edits=edits)
    fits: list[LayerFit] = []
    for number, layer in enumerate(layers):
        wanted = [Rows(*(part.cpu() for part in rows)) for rows in before.to(layer)]
        with refitted(view, fits):
            given = zip(after.to(layer), wanted, strict=True)
            free = with_bias and keeps_bias(view, edits, layer)
            fits.append(_fitted(view, layer, given, len(wanted), target=target, with_bias=free))
        progress("refit", number + 1, len(layers))
    return tuple(fits)


def cut_layers(view: ModelView, edits: Sequence[Edit]) -> list[int]:
    """Layers in which an edit changes what W_O is given."""
    sites = {site for site in ATTENTION_SITES if site != "attention"}
    return sorted({layer for edit in edits if sites & edit.taps(view).keys() for layer in edit.chosen(view)})


def keeps_bias(view: ModelView, edits: Sequence[Edit], layer: int) -> bool:
    """Whether the output projection of a layer has a bias once the edits are made."""
    made = any(isinstance(edit, ConstantHeads) and layer in edit.layers for edit in edits)
    return made or getattr(output_projection(view, layer), "bias", None) is not None


@contextmanager
def refitted(view: ModelView, fits: Sequence[LayerFit]) -> Iterator[ModelView]:
    """The model with other output projections while the block lasts; its own parameters are put back afterwards."""
    with ExitStack() as undo:
        for fit in fits:
            module = output_projection(view, fit.layer)
            for name in ("weight", "bias"):
                undo.callback(setattr, module, name, getattr(module, name, None))
            install(view, fit, module)
        yield view


def install(view: ModelView, fit: LayerFit, module: nn.Module) -> None:
    """Give an output projection fitted parameters, in the dtype and on the device of those it has."""
    weight = fit.weight if view.family.transposed else fit.weight.T
    module.weight = nn.Parameter(weight.to(module.weight).contiguous(), requires_grad=module.weight.requires_grad)
    if fit.bias is not None:
        module.bias = nn.Parameter(fit.bias.to(module.weight), requires_grad=module.weight.requires_grad)


def _refuse(view: ModelView, calibration: Corpus, target: str) -> None:
    if target not in TARGETS:
        raise RheoscopeError(f"a refit towards {target!r} asked for; the choices are {', '.join(TARGETS)}")
    if calibration.n_windows < 2:
        raise RheoscopeError(
            "a refit on one window asked for; the strength of its ridge is chosen on held-out windows: give more text"
        )
    if view.family is None:
        raise Refused(f"a refit asked for; where {view.model_type} keeps its output projections is not known")
    if target == "stream" and (view.family.residual is Residual.POST_NORM or view.family.attn_term):
        raise Refused(
            f"a refit towards the stream asked for; {view.model_type} norms what attention writes before it is added: "
            "use target='output'"
        )


def _fitted(
    view: ModelView, layer: int, given: Iterator[tuple[Rows, Rows]], n_batches: int, *, target: str, with_bias: bool
) -> LayerFit:
    """The fit of one layer from the rows of the edited and of the original model, batch by batch."""
    weights = view.weights
    W0 = weights.W_O(layer).flatten(0, 1)
    b0 = weights.b_O(layer)
    parts = [Moments.empty(*W0.shape) for _ in range(2)]
    for number, (rows, wanted) in enumerate(given):
        Y = wanted.outputs
        if target == "stream":
            Y = Y + (wanted.stream - rows.stream.cpu()) / view.multiplier
        held_out = number % HELD_OUT == HELD_OUT - 1 or (n_batches < HELD_OUT and number == n_batches - 1)
        parts[held_out].update(rows.inputs, Y)
    choice = chosen_ridge(*parts, W0, b0, with_bias=with_bias)
    return LayerFit(
        layer=layer,
        weight=choice.fitted.W,
        bias=choice.fitted.b if with_bias else None,
        strength=choice.fitted.strength,
        error_before=choice.before,
        error_after=choice.after,
    )
