"""Attention without a softmax in the place of softmax attention, as the model is: zero-shot linearisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from rheoscope.errors import Refused
from rheoscope.models.attention import Attention
from rheoscope.models.interface import Tap
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.features import feature_attention, feature_root


@dataclass(frozen=True)
class Linearize(Edit):
    """Linear attention Σ_{j≤i} φ(q_i)·φ(k_j) v_j / Σ_{j≤i} φ(q_i)·φ(k_j), by running sums.

    feature: φ, one of `FEATURES`; elu + 1 by default. q and k as they enter the score, RoPE included; S-D layers have
    [q; k] and [k; -q] there, and their D goes. The published form, as here by default, leaves the score scale out.
    scaled: q and k times its root first, so that q·k is the score; always with "taylor". A soft-cap goes with the
    scores that it caps. Padded keys enter neither sum.
    Refused: models that read both ways, learned sinks, biases other than -D, and keys hidden by more than padding (a
    sliding window shorter than the text).
    """

    scaled: bool = False
    feature: str = "elu"

    def taps(self, view: ModelView) -> Mapping[str, Tap]:
        if not view.causal:
            raise Refused(f"linear attention asked for; {view.model_type} reads both ways: edit a causal model")
        feature_root(self.feature, 1.0, scaled=self.scaled)

        def tap(layer: int, attention: Attention) -> None:
            _refuse_call(attention, damped=view.is_damped(layer))
            root = feature_root(self.feature, attention.scale, scaled=self.scaled)
            q, k = attention.q * root, attention.k * root
            z, _ = feature_attention(q, k, attention.v, feature=self.feature, valid=_valid_keys(attention))
            attention.mix(z)

        return {"call": tap}


def _refuse_call(attention: Attention, *, damped: bool) -> None:
    """Raise Refused for a call that linear attention has no counterpart of."""
    reason = ""
    if attention.sinks is not None:
        reason = "the model has learned sinks, logits beside the scores, and there are no scores"
    elif attention.bias is not None and not damped:
        reason = "the layer adds a bias to its scores, and there are no scores"
    elif attention.q.shape[2] != attention.k.shape[2]:
        reason = "it is given fewer queries than keys; run whole windows without a cache"
    if reason:
        raise Refused(f"linear attention asked for; {reason}")


def _valid_keys(attention: Attention) -> Bool[Tensor, "batch position"] | None:
    """Keys that are no padding, as the last query sees them. Refused where more is hidden than they and the future."""
    if attention.mask is None:
        return None
    allowed = attention.allowed
    valid = allowed[:, :, -1]
    expected = valid[:, :, None] & torch.ones(allowed.shape[-2:], dtype=torch.bool, device=allowed.device).tril()
    sees = expected.any(-1, keepdim=True)  # rows of padding on the left see nothing, or anything
    if bool(((allowed != expected) & sees).any()) or bool((valid != valid[:, :1]).any()):
        raise Refused(
            "linear attention asked for; keys are hidden by more than causality and padding, as by a sliding window: "
            "give windows no longer than it, or leave those layers out"
        )
    valid = valid[:, 0].expand(len(attention.q), -1)
    return None if bool(valid.all()) else valid
