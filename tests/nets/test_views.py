"""The decoder seen through rheoscope's own taps: what the instruments read is what the model uses."""

import pytest
import torch

from rheoscope.models.view import ModelView
from rheoscope.nets.config import KINDS, LINEAR_KINDS

from .models import tiny, tokens

SOFTMAX_KINDS = [kind for kind in KINDS if kind not in LINEAR_KINDS]


def read(model, text, valid=None):
    """Logits under taps, and what every layer's attention was: its scores and bias, its probabilities, z."""
    seen = []

    def take(_layer, attention):
        seen.append((attention.scores.clone(), attention.bias, attention.probs.clone(), attention.z.clone()))

    view = ModelView(model)
    with torch.no_grad(), view.tapped({"attention": take}):
        return view.forward(text, valid), seen


@pytest.mark.parametrize("kind", SOFTMAX_KINDS)
def test_reading_attention_does_not_change_the_logits(kind):
    model, text = tiny(kind), tokens()
    with torch.no_grad():
        plain = model(text).logits
    logits, seen = read(model, text)
    assert len(seen) == 3
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_scores_and_bias_of_an_sd_layer_are_s_and_minus_d(positions):
    model, text = tiny("sd", positions=positions), tokens()
    _, seen = read(model, text)
    for scores, bias, probs, _ in seen:
        torch.testing.assert_close(scores, -scores.mT, rtol=0, atol=1e-11)
        damping = -bias.diagonal(dim1=-2, dim2=-1)
        assert (damping > 0).all()
        hidden = torch.ones(29, 29, dtype=torch.bool).triu(1)
        wanted = (scores - torch.diag_embed(damping)).masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(probs, wanted, rtol=0, atol=1e-12)


def test_padding_stays_invisible_under_taps():
    model, text = tiny("sd"), tokens(batch=1)
    alone, _ = read(model, text)
    for left in (0, 6):
        row = torch.nn.functional.pad(text, (left, 6 - left))
        valid = torch.nn.functional.pad(torch.ones_like(text), (left, 6 - left)).bool()
        padded, _ = read(model, row, valid)
        torch.testing.assert_close(padded[:, left : left + 29], alone, rtol=0, atol=1e-9)
