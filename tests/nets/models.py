"""Tiny decoders for tests: sizes are distinct primes where the architecture allows, every parameter perturbed."""

import torch

from rheoscope.nets.config import RheoscopeConfig
from rheoscope.nets.decoder import RheoscopeForCausalLM

VOCABULARY, WINDOW = 53, 41


def tiny(kind="softmax", *, seed=0, dtype=torch.float64, attn_implementation=None, **changes):
    """A decoder of three layers in eval mode, no parameter at its start value."""
    fields = {
        "vocab_size": VOCABULARY,
        "hidden_size": 26,
        "intermediate_size": 37,
        "num_hidden_layers": 3,
        "num_attention_heads": 5,
        "head_dims": 6,
        "max_position_embeddings": WINDOW,
        "attention": kind,
    }
    torch.manual_seed(seed)
    config = RheoscopeConfig(**(fields | changes), attn_implementation=attn_implementation)
    model = RheoscopeForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens(length=29, batch=3, *, seed=1):
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
