"""The cases that benchmarks/peers.py compares: plain passes, `measure`, and two notebooks. Each is a function of
(corpus, batch, windows with dense spectra) that returns readings and the seconds that dense spectra took."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from dense import Notebook, defect, shares, sinks, spectra, steering
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import rheoscope
from rheoscope.corpus import Corpus, batches
from rheoscope.instruments.routing.routing import Routing
from rheoscope.instruments.sinks.sinks import SinkReadings
from rheoscope.instruments.steering.steering import Steering

Work = Callable[[Corpus, int, int], tuple[dict[str, list], dict[str, float]]]
Clock = Callable[[], float]
STRIDE = Steering.Options().defect_stride  # positions apart at which the defect is read
ACTIVATIONS = (
    "hook_resid_pre",
    "hook_attn_out",
    "hook_mlp_out",
    "attn.hook_rot_q",
    "attn.hook_rot_k",
    "attn.hook_v",
    "attn.hook_pattern",
)


def plain(folder: str, clock: Clock) -> Work:
    """Forward passes of the untouched model, logits included."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def work(corpus: Corpus, batch: int, dense_windows: int) -> tuple[dict, dict]:
        for windows in batches(corpus, batch):
            model(input_ids=windows.tokens, use_cache=False)
        return {}, {}

    return work


def questions(folder: str, clock: Clock) -> Work:
    """`measure` of what the notebooks answer, spectra of every window."""
    view = rheoscope.load(folder)

    def work(corpus: Corpus, batch: int, dense_windows: int) -> tuple[dict, dict]:
        options = {
            "routing": Routing.Options(n_spectra=corpus.n_windows, n_lag=1),
            "steering": Steering.Options(n_first_order=0, n_top_k=0),
            "sinks": SinkReadings.Options(n_sampled=0),
        }
        names = ["loss", "routing", "steering", "sinks"]
        run = rheoscope.measure(view, corpus, instruments=names, options=options, batch_size=batch, nulls=False)
        data = run["routing"].merge(run["steering"]).merge(run["sinks"], compat="override")
        readings = {str(name): data[name].values.tolist() for name in data if data[name].dtype.kind == "f"}
        readings["first_key_mass"] = data["first_key_mass"].values[..., 0].tolist()
        readings["nll"] = [float(run["loss"].nll_mean)]
        return readings, {}

    return work


def everything(folder: str, clock: Clock) -> Work:
    """`measure` as it comes."""
    view = rheoscope.load(folder)

    def work(corpus: Corpus, batch: int, dense_windows: int) -> tuple[dict, dict]:
        rheoscope.measure(view, corpus, batch_size=batch)
        return {}, {}

    return work


def lens(folder: str, clock: Clock) -> Work:
    """TransformerLens: a filtered cache, then the readings layer by layer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
    names = [f"blocks.{layer}.{name}" for layer in range(bridge.cfg.n_layers) for name in ACTIVATIONS]

    def layers(tokens: Tensor) -> Iterator[tuple]:
        logits, cache = bridge.run_with_cache(tokens, names_filter=names)
        yield logits
        for layer, block in enumerate(bridge.blocks):
            x, A, F, q, k, v, maps = (cache[f"blocks.{layer}.{name}"] for name in ACTIVATIONS)
            alone = block.mlp(block.ln2(x[:, ::STRIDE]))
            yield x, A, F, *(part.transpose(1, 2) for part in (q, k, v)), maps, block.attn.W_O, alone

    return notebook(layers, clock)


def outputs(folder: str, clock: Clock) -> Work:
    """transformers: maps and hidden states as outputs; what is not among them computed again by the model's modules."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    d_head = model.config.head_dim

    def layers(tokens: Tensor) -> Iterator[tuple]:
        output = model(tokens, output_attentions=True, output_hidden_states=True, use_cache=False)
        yield output.logits
        places = torch.arange(tokens.shape[1])[None]
        for layer, x, maps in zip(model.model.layers, output.hidden_states[:-1], output.attentions, strict=True):
            attention, read = layer.self_attn, layer.input_layernorm(x)
            projections = attention.q_proj, attention.k_proj, attention.v_proj
            q, k, v = (part(read).unflatten(-1, (-1, d_head)).transpose(1, 2) for part in projections)
            q, k = apply_rotary_pos_emb(q, k, *model.model.rotary_emb(read, places))
            z = maps @ v.repeat_interleave(maps.shape[1] // v.shape[1], 1)
            A = attention.o_proj(z.transpose(1, 2).flatten(2))
            F = layer.mlp(layer.post_attention_layernorm(x + A))
            alone = layer.mlp(layer.post_attention_layernorm(x[:, ::STRIDE]))
            W_O = attention.o_proj.weight.T.unflatten(0, (-1, d_head))
            yield x, A, F, q, k, v, maps, W_O, alone

    return notebook(layers, clock)


def notebook(layers: Callable[[Tensor], Iterator[tuple]], clock: Clock) -> Work:
    """All readings from the logits and then, layer by layer, from (x, A, F, q, k, v, maps, W_O, alone)."""

    @torch.no_grad()
    def work(corpus: Corpus, batch: int, dense_windows: int) -> tuple[dict, dict]:
        book, first = Notebook(clock), 0
        for windows in batches(corpus, batch):
            parts = layers(windows.tokens)
            book.add(0, {"nll": losses(next(parts), windows.tokens)})
            dense = min(max(dense_windows - first, 0), len(windows.tokens))
            for layer, part in enumerate(parts):
                read_layer(book, layer, part, dense)
            first += len(windows.tokens)
            del parts, part  # before the next batch makes its own
        readings = book.readings()
        if dense_windows < corpus.n_windows:  # read on fewer windows than ours
            readings = {name: value for name, value in readings.items() if name in WITHOUT_SPECTRA}
        return readings, dict(book.seconds)

    return work


WITHOUT_SPECTRA = (
    "nll",
    "routing_share",
    "diagonal_share",
    "gauge_share",
    "sink_mass",
    "first_key_mass",
    "diagonal_mass",
    "previous_mass",
    "hard_switch_share",
    "soft_switch_share",
    "value_ratio",
    "angular_deficit",
    "ffn_deficit",
    "attention_radial_share",
    "ffn_radial_share",
    "resid_norm",
    "turning",
    "diversity_pre",
    "diversity_post",
    "defect",
)


def read_layer(book: Notebook, layer: int, part: tuple, dense: int) -> None:
    """All readings of one layer; dense spectra of the first `dense` windows of the batch."""
    x, A, F, q, k, v, maps, W_O, alone = part
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    M = q @ k.mT / q.shape[-1] ** 0.5
    book.add(layer, shares(M))
    if dense:
        book.add(layer, spectra(M[:dense], q.shape[-1], book))
    book.add(layer, sinks(maps, (v @ W_O).norm(dim=-1)))
    book.add(layer, steering(x, A, F))
    book.add(layer, defect(F[:, ::STRIDE], alone))


def losses(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of every window in nats, and the tokens that it sums over."""
    scored = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(*scored, reduction="none").unflatten(0, (len(tokens), -1)).sum(1)
    return loss, torch.full_like(loss, tokens.shape[1] - 1)


CASES: dict[str, Callable[[str, Clock], Work]] = {
    "plain": plain,
    "rheoscope": questions,
    "rheoscope, all": everything,
    "transformer_lens": lens,
    "transformers": outputs,
}
