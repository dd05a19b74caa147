"""Algebraic identities on the user's own model: each holds, or is refused with a reason, or fails by a stated amount.

An identity that fails in the model's dtype, or that a coarse dtype cannot decide, is tried again on a float64 copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor

from rheoscope.errors import Refused
from rheoscope.models.checkpoint import first_line
from rheoscope.models.identities import IDENTITIES, Measured
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.view import ModelView

LENGTH = 48
LONGEST = 1024  # tokens spent to reach past a sliding window
DECISIVE = 1e-3  # a wider floor, as of bfloat16, would let a wrong formula pass


@dataclass(frozen=True)
class Finding:
    """What became of one identity.

    error: largest difference over the largest number compared; floor: what rounding in `dtype` may make of it.
    status: holds, refused or fails. reason: why refused, why it cannot be computed, or what was seen in the model's own
    dtype before float64.
    """

    identity: str
    status: str
    error: float = float("nan")
    floor: float = float("nan")
    dtype: str = ""
    reason: str = ""


@torch.no_grad()
def check(view: ModelView, *, seed: int = 0, progress: Callable[[str], None] = lambda name: None) -> list[Finding]:
    """Every identity of IDENTITIES on this model, on random tokens long enough to leave any sliding window."""
    trial = _Trial(view, _tokens(view, seed))
    findings = []
    for name, identity in IDENTITIES.items():
        progress(name)
        try:
            findings.append(trial.finding(name, identity))
        except Refused as refused:
            findings.append(Finding(name, "refused", reason=str(refused)))
    return findings


@dataclass
class _Trial:
    """One model, the tokens it is tried on, and its float64 copy once that is needed."""

    view: ModelView
    tokens: Tensor

    def finding(self, name: str, identity: Callable[[ModelView, Tensor], Measured]) -> Finding:
        """One identity in the model's dtype, and in float64 if it fails or cannot fail there."""
        first = _judged(name, identity, self.view, self.tokens)
        if first.dtype == "float64" or first.reason or (first.status == "holds" and first.floor <= DECISIVE):
            return first
        seen = f"in {first.dtype} off by {first.error:.1e} (floor {first.floor:.1e})"
        return replace(_judged(name, identity, self.exact(seen), self.tokens), reason=seen)

    def exact(self, seen: str) -> ModelView:
        """The model in float64. Refused where its weights are not at hand."""
        if any(p.is_meta or not p.is_floating_point() for p in self.view.model.parameters()):
            raise Refused(f"{seen}; the weights are quantised or offloaded and float64 cannot tell: load them whole")
        return self._exact

    @cached_property
    def _exact(self) -> ModelView:
        twin = copy.deepcopy(self.view.model)
        twin = (twin.cpu() if self.view.device.type == "mps" else twin).double()
        twin.config._experts_implementation = "eager"  # grouped matrix products take no float64
        return ModelView(twin, self.view.tokenizer, self.view.ref)


def _judged(name: str, identity: Callable[[ModelView, Tensor], Measured], view: ModelView, tokens: Tensor) -> Finding:
    """One identity in the dtype of the view; one whose parts do not even fit together fails."""
    dtype = str(view.dtype).removeprefix("torch.")
    try:
        with Float64Throughout() if view.dtype == torch.float64 else nullcontext():
            error, epsilons = identity(view, tokens)
    except torch.OutOfMemoryError:
        raise Refused(f"not enough memory to try it in {dtype}: load the model on the CPU") from None
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        return Finding(name, "fails", dtype=dtype, reason=f"cannot be computed: {first_line(error)}")
    floor = epsilons * torch.finfo(view.dtype).eps
    return Finding(name, "holds" if error <= floor else "fails", error, floor, dtype)


def _tokens(view: ModelView, seed: int) -> Int[Tensor, "one position"]:
    window = max((w for w in view.windows if w is not None and w < LONGEST), default=0)
    length = max(LENGTH, window + 8)
    length = min(length, view.context or length)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = view.model.get_input_embeddings().weight.shape[0]
    special = set(getattr(view.tokenizer, "all_special_ids", None) or [view.pad_token])
    ordinary = torch.tensor([token for token in range(vocabulary) if token not in special])
    return ordinary[torch.randint(len(ordinary), (1, length), generator=generator)]
