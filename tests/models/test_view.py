"""A view finds the layers of any model, runs it on padded text, and says why where it cannot."""

import pytest
import torch
import transformers
from torch import nn

from rheoscope.errors import Refused
from rheoscope.models import view as view_module
from rheoscope.models.check import check
from rheoscope.models.families import FAMILIES
from rheoscope.models.field import ffn_of_normed
from rheoscope.models.precision import Float64Throughout
from rheoscope.models.view import ModelView, part, refuse_config
from tests.models.views import caught, outputs, tokens_of, view_of
from tests.tiny import ALL, CAUSAL, REFUSED, VARIANTS, WINDOW, input_ids, tiny

REASONS = {
    "bloom": "computes attention inside its own module",
    "mpt": "computes attention inside its own module",
    "falcon": "computes attention inside its own module",
    "gpt_neo": "computes attention inside its own module",
    "t5": "is an encoder-decoder",
    "mamba": "is recurrent",
    "jamba": "has recurrent layers",
    "deepseek_v2": "has multi-head latent attention",
    "deepseek_v3": "has multi-head latent attention",
}


def viewed(model):
    with Float64Throughout():
        return ModelView(model)


@pytest.fixture
def no_rows(monkeypatch):
    """Nothing is known of any family, good or bad."""
    for table in ("FAMILIES", "REFUSED", "REFUSED_KINDS"):
        monkeypatch.setattr(view_module, table, {})


@pytest.mark.parametrize("name", VARIANTS)
def test_sizes_are_those_of_the_model(name):
    view, kwargs = view_of(name), VARIANTS[name].kwargs
    sizes = (view.n_layers, view.n_heads, view.d_model, len(view.blocks), len(view.attentions))
    width = kwargs.get("hidden_size") or kwargs.get("n_embd") or kwargs.get("dim")
    heads = kwargs.get("num_attention_heads", 6)
    assert sizes == (3, heads, width, 3, 3)
    groups = 1 if name == "gpt_bigcode" else heads
    assert view.n_kv_heads == kwargs.get("num_key_value_heads", groups)
    assert view.d_head == view.d_value == kwargs.get("head_dim", width // heads)
    assert view.causal == VARIANTS[name].causal
    assert view.has_loss == (name in CAUSAL)
    assert view.n_parameters == sum(p.numel() for p in view.model.parameters())
    assert view.dtype == torch.float64
    assert view.device.type == "cpu"
    assert view.one_stream


def test_key_heads_may_be_one_some_or_all():
    assert [view_of(f"llama{kind}").n_kv_heads for kind in (":mqa", "", ":biases", ":mha")] == [1, 2, 3, 6]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_context_is_as_long_as_the_positions_reach(name):
    view = view_of(name)
    expected = {"roberta": 29, "llama:llama3-rope": 32, "llama:yarn": 32, "gpt_oss": 32}.get(name, 31)
    assert view.context == expected
    assert outputs(view, tokens_of(view, length=view.context)).shape[1] == view.context


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "roberta", "distilbert"])
def test_a_text_longer_than_the_context_has_no_learned_positions(name):
    view = view_of(name)
    with pytest.raises((IndexError, RuntimeError)):
        outputs(view, tokens_of(view, length=view.context + 1))


@pytest.mark.parametrize("name", VARIANTS)
def test_outputs_are_those_of_the_plain_model(name):
    view = view_of(name)
    tokens = tokens_of(view)
    with torch.no_grad(), Float64Throughout():
        torch.testing.assert_close(view.forward(tokens), view.model(tokens).logits, rtol=0, atol=1e-13)
        hidden = view.model.base_model(tokens).last_hidden_state
        torch.testing.assert_close(view.forward(tokens, head=False), hidden, rtol=0, atol=1e-13)


def test_padding_on_the_left_is_refused_where_positions_cannot_be_given():
    sizes = {"d_model": 12, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 8}
    view = ModelView(transformers.BartForCausalLM(transformers.BartConfig(vocab_size=61, **sizes)))
    assert not view.takes_positions
    valid = torch.ones(2, 13, dtype=torch.bool)
    valid[0, :2] = False
    with pytest.raises(Refused, match="padding on the left given; bart takes no position ids: pad on the right"):
        view.forward(tokens_of(view), valid)
    findings = {finding.identity: finding.status for finding in check(view)}
    assert findings["batching and padding change nothing"] == "holds"


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "bert", "roberta"])
def test_a_bare_model_gives_hidden_states_and_has_no_loss(family):
    bare = viewed(tiny(family, bare=True))
    whole = view_of(family)
    assert not bare.has_loss
    assert bare.family == whole.family
    with torch.no_grad(), Float64Throughout():
        hidden = bare.forward(tokens_of(whole))
    assert hidden.shape == (*tokens_of(whole).shape, whole.d_model)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("LlamaForSequenceClassification", "llama"),
        ("BertForSequenceClassification", "bert"),
        ("BertForTokenClassification", "bert"),
        ("BertForQuestionAnswering", "bert"),
        ("GPT2ForSequenceClassification", "gpt2"),
    ],
)
def test_a_model_with_another_head_is_read_like_one_without(kind, config):
    variant = VARIANTS[config]
    model = getattr(transformers, kind)(getattr(transformers, variant.config)(**variant.kwargs))
    view = ModelView(model)
    assert not view.has_loss
    assert view.forward(input_ids(model)).shape == (2, 13, view.d_model)


def test_a_model_whose_head_has_another_name_gives_its_logits():
    model = transformers.BertForPreTraining(transformers.BertConfig(**VARIANTS["bert"].kwargs))
    view = ModelView(model)
    with torch.no_grad():
        assert torch.equal(view.forward(input_ids(model)), model(input_ids(model)).prediction_logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_feed_forward_network_gives_for_its_input_what_it_adds(name):
    view = view_of(name)
    read = caught(view, tokens_of(view), "ffn_in", "ffn_out")
    for layer in range(view.n_layers):
        with torch.no_grad(), Float64Throughout():
            got = ffn_of_normed(view, layer, read["ffn_in"][layer])
        torch.testing.assert_close(got, read["ffn_out"][layer], rtol=0, atol=1e-12)


def test_a_view_puts_the_model_in_evaluation_mode():
    assert not ModelView(tiny("llama").train()).model.training


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_handled_is_refused_by_its_configuration_with_the_reason(name):
    variant = ALL[name]
    config = getattr(transformers, variant.config)(**variant.kwargs)
    with pytest.raises(Refused) as refused:
        refuse_config(config)
    assert str(refused.value) == " ".join(str(refused.value).split())
    assert f"{name} {REASONS[name]}" in str(refused.value)
    assert "use a family of docs/families.md" in str(refused.value)


@pytest.mark.parametrize("name", sorted({"bloom", "mpt", "falcon", "gpt_neo", "mamba", "jamba"}))
def test_what_is_not_handled_is_refused_even_if_nothing_is_known_of_it(name, no_rows):
    with pytest.raises(Refused, match=f"^{name} (makes no call of|has 3 layers and calls|does not attend through)"):
        viewed(tiny(name))


def test_a_hybrid_that_is_not_known_is_refused(no_rows):
    model = tiny("llama")
    model.model.layers[1].self_attn = Recurrent()
    with pytest.raises(Refused, match="llama has 3 layers and calls attention 2 times: hybrids with recurrent layers"):
        viewed(model)


class Recurrent(nn.Module):
    """What a hybrid has in place of attention."""

    def forward(self, hidden_states, **_):
        return hidden_states.cumsum(1), None


def test_layers_that_share_one_attention_module_are_refused():
    model = tiny("llama")
    model.model.layers[2].self_attn = model.model.layers[0].self_attn
    with pytest.raises(Refused, match="llama calls one attention module more than once: shared layers"):
        viewed(model)


def test_layers_of_different_sizes_are_refused():
    model, other = tiny("llama"), tiny("llama:mha")
    model.model.layers[1].self_attn = other.model.layers[1].self_attn
    with pytest.raises(Refused, match=r"llama has layers of different head counts or sizes \[.6, 2, 10, 10., .6, 6,"):
        viewed(model)


def test_attention_that_stands_in_no_numbered_block_is_refused(no_rows):
    model = tiny("llama", num_hidden_layers=1)
    model.model.layers = Unnumbered(model.model.layers[0])
    with pytest.raises(Refused, match=r"attention module 'model.layers.only.self_attn' stands in no numbered block"):
        viewed(model)


class Unnumbered(nn.Module):
    """A list of one layer that has a name for it."""

    def __init__(self, layer):
        super().__init__()
        self.only = layer

    def __getitem__(self, _):
        return [self.only]


def test_what_attention_does_beyond_its_call_is_noticed(monkeypatch):
    """A model that mixes the map after its call, or reads an argument we do not know, would be read half right."""
    model = tiny("llama")
    original = model.model.layers[0].self_attn.forward

    def more(*args, **kwargs):
        output, maps = original(*args, **kwargs)
        return output * (2 if model.config._attn_implementation == "eager" else 1), maps

    model.model.layers[0].self_attn.forward = more
    with pytest.raises(Refused, match=r"llama does more in attention than its call .* says \(outputs change by \d+%"):
        viewed(model)


@pytest.mark.parametrize("kind", ["ViT", "CLIP"])
def test_a_model_that_wants_more_than_token_ids_is_refused(kind):
    small = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    picture, text = {**small, "image_size": 32}, {**small, "vocab_size": 50000}
    config = transformers.ViTConfig(**picture)
    if kind == "CLIP":
        config = transformers.CLIPConfig(text_config=text, vision_config=picture)
    with pytest.raises(Refused, match=r"does not run on a few token ids.*: rheoscope reads models of text only"):
        ModelView(getattr(transformers, f"{kind}Model")(config))


def test_weights_of_a_model_type_without_a_row_are_refused(monkeypatch):
    monkeypatch.setattr(view_module, "FAMILIES", {n: row for n, row in FAMILIES.items() if n != "llama"})
    with pytest.raises(Refused, match=r"weights asked for; the model type 'llama' has no row .*, or add a row"):
        _ = viewed(tiny("llama")).weights


def test_a_path_of_a_row_leads_to_a_module():
    view = view_of("llama")
    assert part(view.model.base_model, "layers.1.self_attn.q_proj") is view.part(1, "self_attn.q_proj")
    assert view.windows == [None] * 3
    assert view_of("mistral").windows == [WINDOW] * 3


@pytest.mark.parametrize("padding", [0, 1, 2, -1, None])
def test_padding_whose_embedding_is_zero_is_no_hindrance(padding):
    model = tiny("llama", pad_token_id=padding)
    words = model.get_input_embeddings().weight
    words.data[padding or 0] = 0
    assert viewed(model).n_layers == 3


def test_words_whose_embeddings_are_zero_are_no_hindrance():
    model = tiny("llama")
    model.get_input_embeddings().weight.data[:4] = 0
    assert viewed(model).n_layers == 3
