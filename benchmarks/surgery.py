"""What edits save on this machine: python benchmarks/surgery.py [prefill|layer|decode|parallel] [--threads 1]

prefill   the mixing of one layer at SmolLM2's shape (9 heads of 64 on 3 of keys), linear against SDPA, by length
layer     the same with the projections, RoPE and W_O around it: a whole attention module, 576 wide
decode    mixing one more token in 30 layers after --context tokens; bytes of cache at several contexts
parallel  Llama at SmolLM2's shape, untrained: sequential, parallel and fused; prefill and decode

All that is compared is run in turn, and the least time of each counts, as what disturbs only adds. On one thread it is
processor time, so that other work on the machine is not counted; on more, time of the clock: nothing else may run.
Without a part, all of them.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from shapes import smollm2
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from rheoscope.models.view import ModelView
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_structure import Parallelize
from rheoscope.surgery.features import FEATURES, feature_attention
from rheoscope.surgery.restructure import restructured

HEADS, KEY_HEADS, WIDTH, LAYERS = 9, 3, 64, 30
LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SECONDS = 6.0  # of turns at one length
TAYLOR_UP_TO = 4096


def now():
    """Seconds."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def least(calls, seconds=SECONDS, turns=50):
    """Least milliseconds of each call, taken in turn for so long."""
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    ends = now() + seconds
    for turn in range(turns):
        if turn > 1 and now() > ends:
            break
        for name, call in calls.items():
            start = now()
            call()
            times[name].append(now() - start)
    return {name: 1e3 * min(taken) for name, taken in times.items()}


def heads(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((1, n, length, WIDTH) for n in (HEADS, KEY_HEADS, KEY_HEADS))
    return [torch.randn(shape, generator=generator) for shape in shapes]


def softmax_mixing(q, k, v, **options):
    return scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)


def prefill():
    """Milliseconds of the mixing alone."""
    print("tokens   softmax ms   " + "   ".join(f"{name} ms (times)" for name in FEATURES))
    for length in LENGTHS:
        q, k, v = heads(length)
        names = [name for name in FEATURES if name != "taylor" or length <= TAYLOR_UP_TO]
        calls = {name: partial(feature_attention, q, k, v, feature=name) for name in names}
        found = least({"sdpa": partial(softmax_mixing, q, k, v, is_causal=True), **calls})
        parts = (f"{found[name]:.2f} ({found['sdpa'] / found[name]:.2f})" for name in names)
        print(f"{length:6d}   {found['sdpa']:.2f}   " + "   ".join(parts), flush=True)


def llama(n_layers, context):
    config = smollm2(num_hidden_layers=n_layers, vocab_size=1024, max_position_embeddings=context)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def layer():
    """Milliseconds of a whole attention module."""
    view = ModelView(llama(1, LENGTHS[-1]))
    print("tokens   softmax ms   elu ms (times)   softmax features ms (times)")
    modules = {"sdpa": view.model.model}
    for feature in ("elu", "softmax"):
        modules[feature] = restructured(view, [Linearize(feature=feature, scaled=True)])
    for length in LENGTHS:
        x = torch.randn(1, length, HEADS * WIDTH)
        places = view.model.model.rotary_emb(x, torch.arange(length)[None])
        calls = {}
        for name, model in modules.items():
            module = (model if name == "sdpa" else model.base_model).layers[0].self_attn
            calls[name] = partial(module, x, position_embeddings=places, attention_mask=None)
        found = least(calls)
        parts = (f"{found[name]:.2f} ({found['sdpa'] / found[name]:.2f})" for name in ("elu", "softmax"))
        print(f"{length:6d}   {found['sdpa']:.2f}   " + "   ".join(parts), flush=True)


def decode(context):
    """Milliseconds that mixing takes for one more token in all layers, and bytes of what is kept of the past."""
    one = heads(1, seed=1)
    cache = DynamicCache()
    for index in range(LAYERS):
        _, k, v = heads(context, seed=index)
        cache.update(k, v, index)
    states = {}
    for feature in ("elu", "softmax"):
        q, k, v = heads(64)
        states[feature] = [feature_attention(q, k, v, feature=feature)[1] for _ in range(LAYERS)]

    def softmax():
        for kept in cache.layers:
            softmax_mixing(one[0], kept.keys, kept.values)

    def growing():
        for kept in cache.layers:
            grown = DynamicLayer()
            grown.keys, grown.values, grown.is_initialized = kept.keys, kept.values, True
            grown.dtype, grown.device = kept.keys.dtype, kept.keys.device
            softmax_mixing(one[0], *grown.update(one[1], one[2]))

    def linear(feature):
        for state in states[feature]:
            feature_attention(*one, feature=feature, state=state)

    calls = {"softmax, keys at hand": softmax, "softmax, keys appended as transformers does": growing}
    calls |= {f"linear, {feature}": partial(linear, feature) for feature in states}
    found = least(calls, seconds=30.0)
    for name, taken in found.items():
        print(f"{LAYERS} layers after {context:,} tokens, {name}: {taken:.2f} ms")
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    print(f"cache of softmax after {context:,} tokens: {kept / 1e6:.1f} MB")
    view = ModelView(llama(LAYERS, 2 * context))
    for feature in states:
        model = restructured(view, [Linearize(feature=feature, scaled=True)])
        for length in (16, 1024):
            past = model(torch.zeros(1, length, dtype=torch.long), use_cache=True).cache
            size = sum(layer.state.nbytes for layer in past.layers)
            print(f"cache of linear, {feature}, after {length:,} tokens: {size:,} bytes")


def parallel():
    """Milliseconds of prefill (512 tokens) and of one token decoded after it, by how the layers are built."""
    view = ModelView(llama(LAYERS, 2048))
    models = {"sequential": view.model}
    models["parallel"] = restructured(view, [Parallelize()])
    models["fused"] = restructured(view, [Parallelize(fused=True)])
    tokens = torch.randint(0, 1024, (1, 513), generator=torch.Generator().manual_seed(0))
    caches = {}
    for name, model in models.items():
        caches[name] = model(tokens[:, :512], use_cache=True).cache

    def one_more(name):
        models[name](tokens[:, 512:], cache=caches[name], use_cache=True)
        for kept in caches[name].layers:
            kept.crop(-1)
        assert caches[name].get_seq_length() == 512

    runs = {
        "prefill of 512": {name: partial(model, tokens[:, :512], use_cache=False) for name, model in models.items()},
        "one token after 512": {name: partial(one_more, name) for name in models},
    }
    for phase, calls in runs.items():
        found = least(calls, seconds=60.0)
        for name, taken in found.items():
            print(f"{phase}, {name}: {taken:.1f} ms, {found['sequential'] / taken:.3f} times as fast as sequential")


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("prefill", "layer", "decode", "parallel"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=8192)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    parts = {"prefill": prefill, "layer": layer, "parallel": parallel, "decode": lambda: decode(options.context)}
    for part in [options.part] if options.part else parts:
        parts[part]()


if __name__ == "__main__":
    main()
