"""`check` in a coarse dtype: float64 decides, no wrong row passes for rounding, and what cannot be told is said."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from rheoscope.models import check as check_module
from rheoscope.models import identities
from rheoscope.models import view as view_module
from rheoscope.models.check import check
from rheoscope.models.families import FAMILIES
from rheoscope.models.identities import IDENTITIES
from rheoscope.models.view import ModelView
from tests.models.views import marks, view_of
from tests.tiny import tiny

MAPS = "attention maps read = the model's own"
SUM = "resid_pre + attn_out + ffn_out = resid_post"
PAST = "a changed token leaves the past bit-equal"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_coarse_dtype_decides_nothing_and_float64_does(dtype):
    view = ModelView(tiny("llama", dtype=dtype))
    before, weights = marks(view.model), [parameter.clone() for parameter in view.model.parameters()]
    short = str(dtype).removeprefix("torch.")
    for finding in check(view):
        assert finding.status == "holds", finding
        if finding.identity == PAST:
            assert (finding.dtype, finding.error, finding.reason) == (short, 0, "")
        else:
            assert finding.dtype == "float64"
            assert finding.error <= finding.floor < 1e-12
            assert finding.reason.startswith(f"in {short} off by ")
            assert "(floor " in finding.reason
    assert view.dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(weights, view.model.parameters(), strict=True))
    assert {n: v for n, v in marks(view.model)[1].items() if v} == {n: v for n, v in before[1].items() if v}


def test_a_wrong_row_does_not_pass_for_the_rounding_of_a_coarse_dtype(monkeypatch):
    monkeypatch.setitem(view_module.FAMILIES, "granite", replace(FAMILIES["granite"], multiplier=None))
    view = ModelView(tiny("granite", dtype=torch.bfloat16))
    finding = next(finding for finding in check(view) if finding.identity == SUM)
    assert (finding.status, finding.dtype) == ("fails", "float64")
    assert finding.error > 0.01


def test_a_wrong_row_whose_error_hides_in_a_coarse_dtype_is_found_in_float64(monkeypatch):
    monkeypatch.setitem(view_module.FAMILIES, "granite", replace(FAMILIES["granite"], multiplier=None))
    view = ModelView(tiny("granite", dtype=torch.bfloat16, residual_multiplier=0.98))
    with torch.no_grad():
        seen = check_module._judged(SUM, IDENTITIES[SUM], view, torch.arange(3, 31)[None])
    assert seen.status == "holds"  # by the rounding that bfloat16 may have
    finding = next(finding for finding in check(view) if finding.identity == SUM)
    assert (finding.status, finding.dtype) == ("fails", "float64")


def test_float32_decides_by_itself():
    for finding in check(ModelView(tiny("llama", dtype=torch.float32))):
        assert (finding.status, finding.dtype, finding.reason) == ("holds", "float32", "")


def test_what_fails_in_float32_by_rounding_alone_holds_in_float64(monkeypatch):
    monkeypatch.setattr(identities, "DEEP", 0.01)
    found = {finding.identity: finding for finding in check(ModelView(tiny("llama", dtype=torch.float32)))}
    assert found[MAPS].dtype == "float64"
    assert found[MAPS].reason.startswith("in float32 off by ")


def test_the_float64_copy_is_made_once(monkeypatch):
    made = []
    original = check_module.copy.deepcopy
    monkeypatch.setattr(check_module.copy, "deepcopy", lambda x, *memo: made.append(type(x)) or original(x, *memo))
    check(ModelView(tiny("llama", dtype=torch.bfloat16)))
    assert made.count(LlamaForCausalLM) == 1


@pytest.mark.parametrize("kind", ["quantised", "offloaded"])
def test_weights_that_are_not_at_hand_cannot_be_judged_in_float64(kind):
    view = ModelView(tiny("llama", dtype=torch.bfloat16))
    more = {"quantised": torch.zeros(3, dtype=torch.int8), "offloaded": view.model.lm_head.weight.to("meta")}[kind]
    view.model.register_parameter("more", nn.Parameter(more, requires_grad=False))
    found = {finding.identity: finding for finding in check(view)}
    assert found[MAPS].status == "refused"
    assert "in bfloat16 off by" in found[MAPS].reason
    assert found[MAPS].reason.endswith("float64 cannot tell: load them whole")
    assert found[PAST].status == "holds"


def test_too_little_memory_is_a_reason_and_no_crash(monkeypatch):
    def full(view, tokens):
        raise torch.OutOfMemoryError("out")

    monkeypatch.setitem(IDENTITIES, MAPS, full)
    found = next(finding for finding in check(view_of("llama")) if finding.identity == MAPS)
    assert found.status == "refused"
    assert found.reason == "not enough memory to try it in float64: load the model on the CPU"
