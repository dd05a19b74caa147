"""Runs with plausible made-up numbers, for tests of what a report shows."""

import numpy as np
import xarray as xr

from rheoscope.instruments.catalog import describe
from rheoscope.run import Run

PROVENANCE = {
    "config": {"window": 256, "batch": 8},
    "model": {
        "ref": "made-up/small-model",
        "family": "llama",
        "model_type": "llama",
        "n_layers": 6,
        "n_heads": 8,
        "n_kv_heads": 4,
        "d_model": 512,
        "d_head": 64,
        "parameters": 134515008,
        "weights_hash": "sha256:6b0f3f61a4e1b1f7",
        "dtype": "float32",
        "device": "cpu",
    },
    "text": {
        "sources": ["wiki.test.txt"],
        "hash": "sha256:90ab12cd34ef5678",
        "n_documents": 61,
        "n_windows": 240,
        "window": 256,
        "tokens": 61440,
        "first_tokens": ["<|begin|>", "The", " flow", " of", "\n", " Naïve", "\u202e", "…"],
        "tail": "drop",
        "left_out": {"documents shorter than a window": 17},
    },
    "versions": {"rheoscope": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
    "seed": 0,
    "created": "2026-07-01T12:00:00+00:00",
    "wall_seconds": 754.2,
    "command": "rheoscope measure made-up/small-model --text wiki.test.txt --out run.nc",
    "check": [
        {
            "identity": "residual sum",
            "status": "holds",
            "error": 2.1e-7,
            "floor": 1.9e-6,
            "dtype": "float32",
            "reason": "",
        },
        {"identity": "lag from weights", "status": "refused", "error": float("nan"), "reason": "no rotary positions"},
    ],
}


def synthetic_run(n_layers: int = 6, n_heads: int = 8, *, seed: int = 0, lags: int = 255, **model: object) -> Run:
    """A run of loss and routing with the dims that instruments return and values within their bounds."""
    rng = np.random.default_rng(seed)
    shape = PROVENANCE["model"] | {"n_layers": n_layers, "n_heads": n_heads} | model
    routing = describe(routing_dataset(rng, n_layers, n_heads, lags), "routing")
    loss = describe(loss_dataset(rng, lags + 1), "loss")
    return Run.of({"loss": loss, "routing": routing}, PROVENANCE | {"model": shape})


def loss_dataset(rng: np.random.Generator, window: int, documents: int = 61) -> xr.Dataset:
    tokens = rng.integers(40, 4000, documents)
    nll = 3.2 + rng.standard_normal(documents) * (0.25 + 4 / np.sqrt(tokens))
    position = 3.1 + 4 / np.sqrt(1 + np.arange(window)) + 0.12 * rng.standard_normal(window)
    position[0] = np.nan
    mean = float((nll * tokens).sum() / tokens.sum())
    return xr.Dataset(
        {
            "nll_mean": mean,
            "nll_mean_se": 0.0214,
            "bits_per_byte": mean / 2.9,
            "bits_per_byte_se": 0.0071,
            "perplexity": np.exp(mean),
            "perplexity_se": np.exp(mean) * 0.0214,
            "nll": ("document", nll),
            "tokens": ("document", tokens),
            "nll_by_position": ("position", position),
        },
        coords={"document": np.arange(documents), "position": np.arange(window)},
        attrs={"n": documents},
    )


def routing_dataset(rng: np.random.Generator, n_layers: int, n_heads: int, lags: int) -> xr.Dataset:
    depth = np.linspace(0, 1, n_layers)[:, None]
    size = (n_layers, n_heads)
    capacity = 128.0
    variables: dict[str, tuple] = {}

    def add(name: str, values: np.ndarray, dims: tuple[str, ...] = ("layer", "head"), **beside: np.ndarray) -> None:
        variables[name] = (dims, values)
        variables.update({f"{name}_{role}": (dims, other) for role, other in beside.items()})

    share = np.clip(0.25 - 0.15 * np.sin(3 * depth) + 0.1 * rng.standard_normal(size), 0.01, 0.9)
    add("routing_share", share, se=0.004 + 0.01 * rng.random(size), null=0.48 + 0.01 * rng.standard_normal(size))
    add("diagonal_share", 0.02 + 0.05 * rng.random(size), se=0.001 + 0.001 * rng.random(size))
    add(
        "gauge_share",
        np.clip(0.65 + 0.15 * rng.standard_normal(size), 0.05, 0.99),
        se=0.01 * rng.random(size),
        null=0.1 * rng.random(size),
    )
    for prefix, wider in (("", 1.0), ("kernel_", 4.0)):
        for part, start in (("routing", 4.0), ("filtering", 7.0), ("score", 8.0)):
            base = np.clip(wider * start * np.exp(0.8 * depth + 0.35 * rng.standard_normal(size)), 2, 120)
            for count, more in (
                ("k90", 1.0),
                ("k95", 1.5),
                ("k99", 2.6),
                ("entropy_rank", 1.2),
                ("participation", 0.7),
            ):
                beside = {} if prefix else {"se": 0.05 * base, "null": np.clip(base * 0 + 40 * more, 2, 128)}
                add(f"{prefix}{part}_{count}", np.clip(base * more, 2, 128), **beside)
                if part == "routing" and not prefix:
                    add(f"routing_{count}_gauge_removed", np.clip(base * more * 1.8, 2, 128))
    add("capacity", np.full(n_layers, capacity), ("layer",))
    add("utilisation", variables["routing_k90"][1] / capacity)
    add("routing_k90_median", np.median(variables["routing_k90"][1], axis=1), ("layer",))
    add("minimal_rank_share", np.array(1 / n_layers), ())
    add_eigenvalues(add, rng, size)
    add_lags(add, rng, size, lags)
    coords = {"layer": np.arange(n_layers), "head": np.arange(n_heads), "lag": np.arange(1, lags + 1)}
    variables["routing_share_null_gaussian"] = ((), 0.5)
    return xr.Dataset(variables, coords=coords, attrs={"n": 61})


def add_eigenvalues(add, rng: np.random.Generator, size: tuple[int, int]) -> None:
    magnitude = np.exp(2 + 1.3 * rng.standard_normal((*size, 32)))
    angle = np.abs(rng.normal(0, 1.3, (*size, 32))) % np.pi
    values = magnitude * np.exp(1j * angle)
    values = np.concatenate([values, values.conj()], axis=-1)
    dims = ("layer", "head", "component")
    add("eigenvalues_re", values.real, dims)
    add("eigenvalues_im", values.imag, dims)
    add("stability_max_re", values.real.max(-1), se=rng.random(size), null=20 + rng.random(size))
    add(
        "stability_share_positive",
        (values.real > 0).mean(-1),
        se=0.01 * rng.random(size),
        null=0.5 + 0.02 * rng.standard_normal(size),
    )


def add_lags(add, rng: np.random.Generator, size: tuple[int, int], lags: int) -> None:
    distance = np.arange(1, lags + 1)
    depth = np.linspace(0, 1, size[0])[:, None]
    share = 0.1 + 0.35 * (1 - np.exp(-distance / (10 + 60 * depth))) + 0.02 * rng.standard_normal((size[0], lags))
    add("routing_share_by_lag", np.clip(share, 0, 1), ("layer", "lag"))
    kernel = 0.5 * (1 - np.exp(-distance / (3 + 20 * rng.random((*size, 1)))))
    add("kernel_routing_share_by_lag", kernel, ("layer", "head", "lag"))
    add("kernel_routing_share", 0.45 + 0.05 * rng.standard_normal(size))
    add("kernel_routing_share_averaged", kernel.mean(-1))
