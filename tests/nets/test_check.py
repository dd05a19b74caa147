"""`check` on saved networks of every kind: each identity holds, or is refused for what that kind is."""

import pytest
import torch

from rheoscope.errors import Refused
from rheoscope.linalg import repeated_keys
from rheoscope.models.check import check
from rheoscope.models.load import load
from rheoscope.models.view import ModelView
from rheoscope.nets.config import KINDS, LINEAR_KINDS

from .models import tiny, tokens

PAST = "a changed token leaves the past bit-equal"
REBUILT = "maps rebuilt from W_Q, W_K = the model's own"
REFUSED = {"ega_published": (PAST, "later tokens act on earlier ones"), "lag_conv": (REBUILT, "averages over")}


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_network_of_every_kind_is_checked_or_refused(kind, positions, tmp_path):
    tiny(kind, positions=positions, dtype=torch.float32).save_pretrained(tmp_path)
    if kind in LINEAR_KINDS:
        with pytest.raises(Refused, match="makes no call of transformers' attention interface"):
            load(tmp_path)
        return
    refused = {}
    for finding in check(load(tmp_path, dtype="float64")):
        assert finding.status in ("holds", "refused"), finding
        if finding.status == "refused":
            refused[finding.identity] = finding.reason
    identity, reason = REFUSED.get(kind, (None, ""))
    assert set(refused) == ({identity} if identity else set())
    assert reason in "".join(refused.values())


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_weights_of_an_sd_layer_make_both_halves_of_what_stands_for_query_and_key(positions):
    view, kept = ModelView(tiny("sd", positions=positions)), {}
    taps = {site: lambda layer, x, site=site: kept.setdefault(site, x.clone()) for site in ("attn_in", "q", "k")}
    with torch.no_grad(), view.tapped(taps, layers=[1]):
        view.forward(tokens())
    q, k = view.weights.projected(1, kept["attn_in"], torch.arange(29))
    torch.testing.assert_close(q, kept["q"], rtol=0, atol=1e-11)
    torch.testing.assert_close(k, repeated_keys(q, kept["k"]), rtol=0, atol=1e-11)
    assert view.d_head == 12
    W_Q, W_K = view.weights.W_Q(1), view.weights.W_K(1)
    kernel = W_Q @ W_K.mT
    assert kernel.shape == (5, 26, 26)
    torch.testing.assert_close(kernel, -kernel.mT, rtol=0, atol=1e-12)


def test_a_kernel_of_averaged_keys_is_refused():
    with pytest.raises(Refused, match="its keys are averages over neighbouring tokens"):
        ModelView(tiny("lag_conv")).weights.kernel(0)
