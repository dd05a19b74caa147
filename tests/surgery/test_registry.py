"""Edits written down and read back."""

import json
from dataclasses import replace

import pytest

from rheoscope.errors import RheoscopeError
from rheoscope.surgery.edits import Edit
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import ConstantHeads, DropHeads
from rheoscope.surgery.edits_steering import GateFFN, TermEdit
from rheoscope.surgery.edits_structure import DropAttention, Parallelize
from rheoscope.surgery.registry import EDITS, from_dict, to_dict

EXAMPLES = [
    DropHeads(heads=((1, 2), (0, 3))),
    ConstantHeads(heads=((0, 1),), constants=((0.1, -2.5e-7),)),
    Linearize(layers=(2,), scaled=True),
    Parallelize(layers=(0, 1), fused=True),
    GateFFN(layers=(1,), gates=(0.3,)),
    DropAttention(),
]


@pytest.mark.parametrize("edit", EXAMPLES, ids=lambda edit: type(edit).__name__)
def test_an_edit_read_back_is_the_edit(edit):
    written = json.loads(json.dumps(to_dict(edit)))
    assert from_dict(written) == edit
    assert written["edit"] == type(edit).__name__


@pytest.mark.parametrize("name", EDITS)
def test_every_edit_with_its_defaults_can_be_written_and_read(name):
    assert from_dict({"edit": name}) == EDITS[name]()


def test_every_edit_of_the_package_is_registered():
    def leaves(kind):
        below = kind.__subclasses__()
        return {kind} | {leaf for one in below for leaf in leaves(one)} if below else {kind}

    abstract = {kind for kind in leaves(Edit) if getattr(kind, "__abstractmethods__", None)}
    named = {kind for kind in leaves(Edit) if kind.__module__.startswith("rheoscope.")}
    assert named - abstract == set(EDITS.values())
    assert TermEdit in abstract


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"edit": "Explode"}, "no edit is called 'Explode'"),
        ({"edit": "os.system"}, "no edit is called"),
        ({}, "no edit is called None"),
        (["DropHeads"], "given as list"),
        ({"edit": "DropHeads", "haeds": []}, "has no field 'haeds'; its fields are layers, heads"),
        ({"edit": "DropHeads", "heads": 3}, "DropHeads.heads is 3: give a list"),
        ({"edit": "DropHeads", "heads": [[1, 2, 3]]}, "give 2 values"),
        ({"edit": "DropHeads", "heads": [[1, "2"]]}, "DropHeads.heads is '2': give a whole number"),
        ({"edit": "DropAttention", "layers": [True]}, "is True: give a whole number"),
        ({"edit": "GateFFN", "gates": ["x"]}, "is 'x': give a number"),
        ({"edit": "GateFFN", "gates": [float("nan")]}, "is nan: give a finite number"),
        ({"edit": "GateFFN", "gates": [float("-inf")]}, "is -inf: give a finite number"),
        ({"edit": "GateFFN", "gates": [10**400]}, "give a number"),
        ({"edit": "ConstantHeads", "heads": [[0, 0]], "constants": [[float("inf")]]}, "give a finite number"),
        ({"edit": "Linearize", "scaled": 1}, "is 1: give true or false"),
        ({"edit": "TruncateRouting", "calibration": None}, "has no field 'calibration'"),
    ],
)
def test_what_is_no_edit_is_refused_in_a_sentence(mapping, message):
    with pytest.raises(RheoscopeError, match=message):
        from_dict(mapping)


def test_whole_numbers_pass_for_real_ones():
    assert from_dict({"edit": "GateFFN", "gates": [1]}) == GateFFN(gates=(1.0,))


def test_an_edit_fitted_on_a_text_is_not_written(fitted):
    with pytest.raises(RheoscopeError, match="holds moments of a text"):
        to_dict(replace(EDITS["TruncateRouting"](), calibration=fitted))


def test_a_foreign_edit_is_not_written():
    with pytest.raises(RheoscopeError, match="it is no edit of rheoscope"):
        to_dict(TermEdit.__new__(type("Own", (DropAttention,), {})))


@pytest.fixture
def fitted():
    import numpy as np

    from rheoscope.surgery.calibration import Calibration

    return Calibration(np.zeros((1, 1, 2, 2)), np.zeros((1, 1, 2)), np.zeros((1, 1)), 1)
