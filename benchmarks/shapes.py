"""The shape that models without weights of their own are timed at."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig


def smollm2(**changes: Any) -> LlamaConfig:
    """SmolLM2-135M's: 30 layers, 9 heads of 64 on 3 of keys."""
    shape = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(shape | changes))
