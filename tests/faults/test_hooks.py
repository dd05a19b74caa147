"""Ctrl-C at any step of what runs a model leaves the model as it was: hooks, implementation, weights, gradients."""

import signal

import pytest
import torch

from rheoscope.instruments.measure import measure
from rheoscope.models.view import ModelView
from rheoscope.surgery.ablation import ablate
from rheoscope.surgery.apply import carried_out
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.edits_structure import DropAttention
from rheoscope.surgery.plan import Plan, PlannedEdit
from rheoscope.surgery.prescribe import prescribe
from rheoscope.surgery.texts import two_texts
from tests.instruments.test_engine import traces_on
from tests.instruments.texts import random_corpus
from tests.tiny import tiny

PLAN = Plan((PlannedEdit(DropHeads(heads=((0, 1),))), PlannedEdit(DropAttention(layers=(2,)))))
WORK = {
    "measure": lambda view, text, told: measure(view, text, batch_size=5, progress=told),
    "ablate": lambda view, text, told: ablate(view, text, progress=told),
    "prescribe": lambda view, text, told: prescribe(view, *two_texts(text, seed=0), n_random=1, progress=told),
    "edit": lambda view, text, told: carried_out(view, PLAN, text, progress=told),
}


class Interrupting:
    """Progress that presses Ctrl-C at one of its calls."""

    def __init__(self, at: int):
        self.at, self.calls = at, 0

    def __call__(self, *_: object) -> None:
        self.calls += 1
        if self.calls == self.at:
            signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def heeded():
    """Ctrl-C as a terminal sends it, also where the tests run in the background, which leaves it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("name", WORK)
def test_ctrl_c_at_every_step_leaves_the_model_as_it_was(name):
    view, text = ModelView(tiny("gpt2", dtype=torch.float32)), random_corpus()
    before = traces_on(view.model)
    interrupted = 0
    for at in (1, 2, 3, 5, 8, 13, 21):
        told = Interrupting(at)
        try:
            WORK[name](view, text, told)
        except KeyboardInterrupt:
            interrupted += 1
        assert traces_on(view.model) == before, f"after step {at}"
        if told.calls < at:
            break
    assert interrupted >= 2
