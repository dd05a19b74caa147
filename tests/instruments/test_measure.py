"""What a measurement promises: the same numbers however the text is fed, the same bytes twice, plain refusals."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from rheoscope.errors import Refused, RheoscopeError
from rheoscope.instruments.catalog import CATALOG, out_of_bounds, quantity_of
from rheoscope.instruments.loss import Loss
from rheoscope.instruments.measure import INSTRUMENTS, measure, weights_hash
from rheoscope.instruments.routing.routing import Routing
from rheoscope.models.view import ModelView
from rheoscope.surgery.edits import Edit, edited
from tests.tiny import Float64Throughout, tiny

from .test_engine import traces_on
from .texts import corpus_of, random_corpus

CORPUS = random_corpus()
ALL = {"routing": Routing.Options(n_spectra=12, n_lag=12, n_null=12)}  # every window, so that no sample is chosen
BOTH = ["loss", "routing"]
# Float64, and only the order of sums differs; ranks are whole numbers.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def readings(view, corpus, **how):
    with Float64Throughout():
        return measure(view, corpus, options=ALL, **{"instruments": BOTH if view.has_loss else ["routing"]} | how)


def assert_same(one, other, *, without=()):
    assert one.instruments == other.instruments
    for instrument in one.instruments:
        expected, found = one[instrument], other[instrument]
        assert set(expected) == set(found)
        for name in set(expected) - set(without):
            np.testing.assert_allclose(found[name].values, expected[name].values, err_msg=str(name), **CLOSE)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "bert"])
def test_the_batch_size_changes_nothing(family):
    view = ModelView(tiny(family))
    one_by_one, together = (readings(view, CORPUS, batch_size=size, nulls=False) for size in (1, 7))
    assert_same(one_by_one, together)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "modernbert"])
def test_padding_changes_nothing(family):
    view = ModelView(tiny(family))
    lengths = (11, 17, 5, 13, 17, 9, 17, 17, 11)
    short = random_corpus(window=17, lengths=lengths, documents=range(9))
    tokens = np.pad(short.tokens, ((0, 0), (0, 10)))
    padded = corpus_of(tokens, lengths=lengths)
    padded_run, short_run = (readings(view, corpus, nulls=False) for corpus in (padded, short))
    for name in map(str, short_run["routing"]):
        ours, expected = padded_run["routing"][name], short_run["routing"][name]
        if "lag" in expected.dims:  # the grid of a longer window reaches farther
            ours, expected = ours.where(ours.lag < 7, drop=True), expected.where(expected.lag < 7, drop=True)
        if name != "capacity":  # of a whole window
            np.testing.assert_allclose(ours, expected, err_msg=name, **CLOSE)
    if view.has_loss:
        loss = padded_run["loss"].isel(position=range(17))
        for name, value in short_run["loss"].items():
            np.testing.assert_allclose(loss[name], value, err_msg=name, **CLOSE)


def test_what_stands_in_the_padding_changes_nothing():
    view = ModelView(tiny("llama"))
    tokens = np.where(np.arange(29) < CORPUS.lengths[:, None], CORPUS.tokens, 7)
    other = corpus_of(tokens, lengths=CORPUS.lengths, documents=CORPUS.documents)
    assert_same(readings(view, CORPUS), readings(view, other))


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_order_of_documents_changes_nothing(family):
    view = ModelView(tiny(family))
    order = np.random.default_rng(1).permutation(12)
    shuffled = CORPUS.of_windows(order)  # documents keep their numbers, and their windows are scattered
    example = ("eigenvalues_re", "eigenvalues_im")  # of the first window, which is another
    assert_same(readings(view, CORPUS), readings(view, shuffled), without=example)


def test_the_same_seed_gives_the_same_bytes():
    view = ModelView(tiny("llama", dtype=torch.float32))
    one, other = (measure(view, CORPUS, instruments=BOTH, seed=3) for _ in range(2))
    for instrument in BOTH:
        for name, values in one[instrument].items():
            assert values.values.tobytes() == other[instrument][name].values.tobytes(), name


def test_another_seed_draws_other_nulls_and_nothing_else():
    view = ModelView(tiny("llama"))
    one, other = (measure(view, CORPUS, instruments=["routing"], seed=seed)["routing"] for seed in (0, 1))
    assert set(one) == set(other)
    drawn = {str(name) for name in one if "_null" in str(name)}
    equal = {str(name) for name in one if np.array_equal(one[name], other[name], equal_nan=True)}
    assert equal >= set(one) - drawn
    assert {name for name in equal & drawn if "_k9" not in name} <= {"minimal_rank_share_null"}  # whole numbers


@pytest.mark.parametrize("packing", ["gpt2", "gpt_neox", "llama:mha"])
def test_a_model_whose_queries_are_its_keys_routes_nothing(packing):
    model = tiny(packing)
    tie_queries_to_keys(model)
    routing = readings(ModelView(model), CORPUS, nulls=False)["routing"]
    assert float(routing.routing_share.max()) < 1e-12
    assert float(routing.kernel_routing_share.max()) < 1e-12
    assert float(routing.routing_share_by_lag.max()) < 1e-12
    for name in ("gauge_share", "routing_k90", "routing_k90_median", "minimal_rank_share", "kernel_routing_k90"):
        assert routing[name].isnull().all(), name  # nothing but rounding to take a share or a rank of


@torch.no_grad()
def tie_queries_to_keys(model):
    """q = k before RoPE, in three fused or separate layouts."""
    for block in model.base_model.h if hasattr(model.base_model, "h") else model.base_model.layers:
        if hasattr(block, "attn"):
            for part in (block.attn.c_attn.weight, block.attn.c_attn.bias):
                part[..., :42] = part[..., 42:84]
        elif hasattr(block, "attention"):
            for part in block.attention.query_key_value.parameters():
                for head in part.chunk(6):
                    head[:10] = head[10:20]
        else:
            block.self_attn.q_proj.weight.copy_(block.self_attn.k_proj.weight)


@dataclass(frozen=True)
class Replace(Edit):
    """Queries and keys replaced by Gaussian noise."""

    def taps(self, view: ModelView) -> Mapping:
        generator = torch.Generator().manual_seed(0)
        noise = lambda layer, x: torch.randn(x.shape, generator=generator, dtype=x.dtype)  # noqa: E731
        return {"q": noise, "k": noise}


def test_unrelated_gaussian_queries_and_keys_route_half_less_the_diagonal():
    view = ModelView(tiny("gpt2"))
    corpus = corpus_of(np.full((60, 29), 5))
    with edited(view, Replace()):
        routing = readings(view, corpus, nulls=False)["routing"]
    share = float(routing.routing_share.mean())  # 60 windows, 18 heads; one spreads by 0.03
    assert share == pytest.approx(0.5 * (1 - 1 / 29), abs=4 * 0.03 / (60 * 18) ** 0.5)


@dataclass(frozen=True)
class Mute(Edit):
    """Attention of the chosen layers adds nothing."""

    def taps(self, view: ModelView) -> Mapping:
        return {"z": lambda layer, z: torch.zeros_like(z)}


def test_a_measurement_inside_an_edit_sees_the_edited_model_and_one_after_it_does_not():
    view = ModelView(tiny("llama"))
    before = readings(view, CORPUS, nulls=False)
    with edited(view, Mute(layers=(1,))):
        inside = readings(view, CORPUS, nulls=False)
    after = readings(view, CORPUS, nulls=False)
    assert_same(before, after)
    assert abs(float(inside["loss"].nll_mean - before["loss"].nll_mean)) > 1e-3
    changed = np.abs(inside["routing"].routing_share - before["routing"].routing_share).max("head")
    assert changed[0] == 0  # before the edit
    assert changed[1] == 0  # scores of the edited layer itself
    assert changed[2] > 1e-3


def test_the_weights_are_read_and_the_nulls_left_out_without_nulls():
    routing = readings(ModelView(tiny("llama")), CORPUS, nulls=False)["routing"]
    assert "kernel_routing_share_averaged" in routing
    assert not [name for name in routing if "_null" in str(name)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_measurement_with_its_nulls_leaves_nothing_on_the_model(family):
    view = ModelView(tiny(family))
    before = traces_on(view.model)
    measure(view, CORPUS, instruments=["routing"])
    assert traces_on(view.model) == before


def test_every_row_of_the_catalogue_is_measured_and_lies_within_its_bounds():
    run = readings(ModelView(tiny("llama")), CORPUS)
    for instrument in BOTH:
        rows = {row.name for row in CATALOG.values() if row.instrument == instrument}
        assert {quantity_of(str(name), instrument)[0].name for name in run[instrument]} == rows
        assert out_of_bounds(run[instrument], instrument) == []
    assert (run["routing"].capacity == 20).all()


def test_a_model_type_without_a_row_has_everything_but_the_weights(monkeypatch):
    monkeypatch.setattr("rheoscope.models.view.FAMILIES", {})
    run = readings(ModelView(tiny("llama")), CORPUS)
    expected = readings(ModelView(tiny("llama")), CORPUS, nulls=False)
    assert "no row" in run["routing"].attrs["kernel_refused"]
    assert not [name for name in run["routing"] if str(name).startswith("kernel")]
    np.testing.assert_allclose(run["routing"].routing_share, expected["routing"].routing_share, rtol=0.2)
    assert "routing_share_null" in run["routing"]


def test_without_names_what_a_model_lacks_is_left_out_and_the_run_says_why(monkeypatch):
    monkeypatch.setattr("rheoscope.instruments.measure.INSTRUMENTS", {"loss": Loss, "routing": Routing})  # the quick
    run = measure(ModelView(tiny("bert")), CORPUS, nulls=False)
    assert "loss" not in run
    assert "routing" in run
    assert "reads both ways" in run.provenance["config"]["left_out"]["loss"]


def test_asked_for_by_name_it_is_refused_with_the_reason():
    with pytest.raises(Refused, match="reads both ways and does not predict the next token"):
        measure(ModelView(tiny("bert")), CORPUS, instruments=["routing", "loss"])


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"instruments": ["los"]}, r"instruments \['los'\] asked for; there are loss, routing"),
        ({"instruments": []}, r"instruments \[\] asked for"),
        ({"options": {"luck": None}}, r"instruments \['luck'\] asked for"),
        ({"instruments": ["loss"], "options": ALL}, "options of routing given, which is not measured"),
        ({"options": {"routing": Routing.Options(n_spectra=0)}}, "n_spectra=0.* at least one window"),
        ({"options": {"routing": Routing.Options(n_lag=0)}}, "n_lag=0.* at least one window"),
        ({"options": {"routing": Routing.Options(n_null=-1)}}, "n_null=-1"),
        ({"instruments": ["loss"], "batch_size": 0}, "a batch of 0 windows"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_run(asked, sentence):
    view = ModelView(tiny("gpt2"))
    view.model.register_forward_pre_hook(lambda *_: pytest.fail("the model was run"))
    with pytest.raises(RheoscopeError, match=sentence):
        measure(view, CORPUS, **asked)


def test_weights_that_cannot_be_exchanged_leave_the_untrained_null_out_and_nothing_else():
    model = tiny("gpt2")
    model.register_parameter("quantised", torch.nn.Parameter(torch.zeros(1, dtype=torch.int8), requires_grad=False))
    routing = measure(ModelView(model), CORPUS, instruments=["routing"])["routing"]
    assert "quantised or missing" in routing.attrs["null_refused"]
    assert "routing_share_null" not in routing
    assert "routing_share_null_gaussian" in routing


def test_a_run_says_what_was_measured_and_on_what():
    view = ModelView(tiny("llama"), ref="some/model")
    run = measure(view, CORPUS, instruments=["loss"], batch_size=3, seed=5, command=["rheoscope", "measure", "a b"])
    record = run.provenance
    assert record["config"] == {
        "instruments": ["loss"],
        "left_out": {},
        "options": {"loss": {}},
        "batch_size": 3,
        "nulls": True,
        "seed": 5,
    }
    assert record["command"] == "rheoscope measure 'a b'"
    assert record["seed"] == 5
    assert {"ref": "some/model", "n_layers": 3, "n_heads": 6, "n_kv_heads": 2}.items() <= record["model"].items()
    assert record["model"]["parameters"] == sum(p.numel() for p in view.model.parameters())
    assert record["text"]["hash"] == CORPUS.hash
    assert record["text"]["tokens"] == CORPUS.lengths.sum()
    assert record["text"]["window"] == 29
    assert record["versions"]["torch"] == torch.__version__


def test_the_weights_hash_tells_models_apart_by_any_single_weight():
    view, same, other = (ModelView(tiny("gpt2")) for _ in range(3))
    with torch.no_grad():
        other.model.transformer.h[2].mlp.c_fc.bias[3] += 1e-6
    assert weights_hash(view) == weights_hash(same)
    assert weights_hash(view) != weights_hash(other)


def test_every_instrument_has_a_name_of_its_own_and_options_with_defaults():
    for name, kind in INSTRUMENTS.items():
        assert kind.name == name
        assert kind.Options() == kind.Options()
