"""Tiny models whose scores are edited, a text and a calibration for them, and what passes through them."""

from dataclasses import replace

import torch

from rheoscope.models.view import ModelView
from rheoscope.surgery.calibration import calibrated
from rheoscope.surgery.edits import edited
from tests.instruments.texts import random_corpus
from tests.nets.models import tiny as tiny_net
from tests.tiny import Float64Throughout, tiny


def view_of(name):
    model = tiny_net("sd", positions="rotary" if "rotary" in name else "learned") if name[:2] == "sd" else tiny(name)
    with Float64Throughout():
        return ModelView(model)


def fitted(view, corpus=None):
    with Float64Throughout():
        return calibrated(view, corpus or text(view), batch_size=5)


def text(view, **shape):
    """Random tokens that every vocabulary has."""
    corpus = random_corpus(**shape)
    return replace(corpus, tokens=corpus.tokens % view.model.config.vocab_size)


@torch.no_grad()
def passed(view, tokens, *edits, valid=None):
    """Logits, and copies of every layer's attention call, under edits."""
    calls = []

    def keep(_layer, attention):
        part = replace(attention)
        part._scores = attention.scores.clone()
        calls.append(part)

    with Float64Throughout(), edited(view, *edits), view.tapped({"attention": keep}):
        return view.forward(tokens, valid), calls
