"""Held-out losses of finished networks, window by window, and whether a prediction needs tokens that come after it.

    python experiments/nets/measure.py runs/ --text tinyshakespeare.txt --out measured/

Every network gives one JSON file; those that are there are left as they are. `prefix`: the loss of a token when the
network is given the tokens before it and nothing else, as in writing, on the first PREFIX_WINDOWS held-out windows.
`window`: the loss of the same tokens when the whole window is given, as in training. Causal networks have the same two.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from jaxtyping import Float, Int
from text import baselines, each_finished, parted
from torch import Tensor
from transformers import AutoModelForCausalLM

from rheoscope.nets.decoder import RheoscopeForCausalLM
from rheoscope.nets.kinds import SelfAttention

PREFIX_WINDOWS = 32
BATCH = 32
GATED = ("softmax", "ega", "ega_published")


def main() -> None:
    """Measure what is missing."""
    each_finished(__doc__, measured)


@torch.inference_mode()
def measured(folder: Path, record: dict, arguments: argparse.Namespace) -> dict:
    """Shape and losses of one network."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    training, held_out = parted(folder, arguments.text)
    tokens = torch.from_numpy(held_out.tokens).long()
    readings = {
        "recipe": record["recipe"],
        "parameters": model.num_parameters(),
        "attention_parameters": attention_parameters(model),
        "baselines": baselines(training, held_out),
        "held_out": [nats for part in tokens.split(BATCH) for nats in token_nll(model, part).mean(1).tolist()],
    }
    if record["recipe"]["kind"] in GATED:
        first = tokens[:PREFIX_WINDOWS]
        readings["window"] = token_nll(model, first).mean(0).tolist()
        prefix = prefix_nll(model, first)
        readings["prefix"] = prefix.mean(0).tolist()
        readings["prefix_held_out"] = prefix.mean(1).tolist()
        readings["leak"] = leak(model, first)
    return readings


def attention_parameters(model: RheoscopeForCausalLM) -> int:
    """Weights of all attention modules."""
    modules = (module for module in model.modules() if isinstance(module, SelfAttention))
    return sum(weight.numel() for module in modules for weight in module.parameters())


def token_nll(model: RheoscopeForCausalLM, tokens: Int[Tensor, "window position"]) -> Float[Tensor, "window scored"]:
    """-log p of every token but the first, the whole window given."""
    log_probs = model(tokens, use_cache=False).logits[:, :-1].double().log_softmax(-1)
    return -log_probs.gather(-1, tokens[:, 1:, None])[..., 0]


def prefix_nll(model: RheoscopeForCausalLM, tokens: Int[Tensor, "window position"]) -> Float[Tensor, "window scored"]:
    """-log p of every token but the first, the tokens before it given and no others."""
    columns = []
    for n in range(1, tokens.shape[1]):
        last = model(tokens[:, :n], use_cache=False, logits_to_keep=1).logits[:, -1].double().log_softmax(-1)
        columns.append(-last.gather(-1, tokens[:, n, None])[:, 0])
    return torch.stack(columns, 1)


def leak(model: RheoscopeForCausalLM, tokens: Int[Tensor, "window position"]) -> float:
    """Largest change of a probability in the first half of a window when the tokens of the second half are reversed."""
    half = tokens.shape[1] // 2
    changed = torch.cat([tokens[:, :half], tokens[:, half:].flip(1)], 1)
    before, after = (model(ids, use_cache=False).logits[:, :half].double().softmax(-1) for ids in (tokens, changed))
    return (before - after).abs().max().item()


if __name__ == "__main__":
    main()
