"""Sizes with names: the published ones, and `micro` for a CPU.

d_model, layers and the GPT-2 vocabulary are published; heads of the two largest too. The others get heads of 64
(32 at 7M), and every preset GPT-2's feed-forward width 4 d_model and learned positions.
"""

from __future__ import annotations

from dataclasses import dataclass

from rheoscope.errors import RheoscopeError
from rheoscope.nets.config import RheoscopeConfig

GPT2_VOCABULARY = 50257
BYTE_VOCABULARY = 257  # 256 bytes and an end of text


@dataclass(frozen=True)
class Preset:
    """Shape and training defaults of one size."""

    d_model: int
    n_layers: int
    n_heads: int
    vocabulary: int = GPT2_VOCABULARY
    tokenizer: str = "gpt2"
    window: int = 1024
    batch: int = 32
    learning_rate: float = 6e-4
    steps: int = 10000


PRESETS = {
    "micro": Preset(128, 4, 4, BYTE_VOCABULARY, "bytes", window=128, batch=16, learning_rate=1e-3, steps=1000),
    "7M": Preset(128, 4, 4, window=256, learning_rate=1e-3),
    "18M": Preset(256, 6, 4, window=256, learning_rate=1e-3),
    "30M": Preset(384, 6, 6),
    "51M": Preset(512, 8, 8),
    "125M": Preset(768, 12, 12),
    "355M": Preset(1024, 24, 16, learning_rate=3e-4),
}


def preset(size: str) -> Preset:
    """The preset of that name. Raises RheoscopeError where there is none."""
    if size not in PRESETS:
        raise RheoscopeError(f"no size is called {size!r}; the sizes are {', '.join(PRESETS)}")
    return PRESETS[size]


def preset_config(size: str, kind: str = "softmax", **changes: object) -> RheoscopeConfig:
    """Configuration of a preset with attention of that kind; `changes` are any fields of RheoscopeConfig."""
    shape = preset(size)
    fields = {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.d_model,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "max_position_embeddings": shape.window,
        "attention": kind,
    }
    return RheoscopeConfig(**(fields | changes))
