"""Measures the trained model on held-out text beside unigram and bigram, and writes both into the package.

OMP_NUM_THREADS=1 python experiments/builtin/card.py --work builtin-training
"""

import argparse
import hashlib
import json
import math
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rheoscope
from rheoscope import corpus
from rheoscope.corpus.manual import manual
from rheoscope.corpus.tokens import document_encoder

ZOO = Path(rheoscope.__path__[0]) / "nets" / "zoo" / "manual"
SHIPPED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# Weights of the unigram distribution in the bigram one, as a number of counts.
PRIOR_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def model_nll(model: torch.nn.Module, text: corpus.Corpus) -> np.ndarray:
    """Negative log-likelihood of the scored tokens, summed over each window, in nats."""
    sums = []
    with torch.inference_mode():
        for batch in corpus.batches(text, 32):
            log_probs = model(input_ids=batch.tokens).logits.double().log_softmax(-1)
            nll = -log_probs[:, :-1].gather(-1, batch.tokens[:, 1:, None])[..., 0]
            sums.append((nll * batch.valid[:, 1:]).sum(1))
    return torch.cat(sums).numpy()


def unigram_probabilities(documents: list[np.ndarray], vocabulary: int) -> np.ndarray:
    """Token frequencies of the training text, one added to each count."""
    counts = np.bincount(np.concatenate(documents), minlength=vocabulary) + 1.0
    return counts / counts.sum()


def bigram_counts(documents: list[np.ndarray], vocabulary: int) -> np.ndarray:
    counts = np.zeros((vocabulary, vocabulary))
    for ids in documents:
        np.add.at(counts, (ids[:-1], ids[1:]), 1.0)
    return counts


def table_nll(table: np.ndarray, text: corpus.Corpus) -> np.ndarray:
    """Negative log-likelihood of the scored tokens under p(next | this) = `table`, summed over each window, in nats."""
    scored = np.arange(1, text.window) < text.lengths[:, None]
    nll = -np.log(table[text.tokens[:, :-1], text.tokens[:, 1:]])
    return np.where(scored, nll, 0).sum(1)


def figures(nll: np.ndarray, text: corpus.Corpus) -> dict[str, float]:
    """Loss per token with its standard error over documents (that of a ratio), and bits per byte."""
    sums = np.bincount(text.documents, nll)
    tokens = np.bincount(text.documents, text.lengths - 1.0)
    loss = sums.sum() / tokens.sum()
    n = len(sums)
    error = math.sqrt(n / (n - 1) * ((sums - loss * tokens) ** 2).sum()) / tokens.sum()
    bits = nll.sum() / text.n_bytes.sum() / math.log(2)
    return {"nats_per_token": round(float(loss), 4), "se": round(error, 4), "bits_per_byte": round(float(bits), 4)}


def text_hash(split: str) -> str:
    """SHA-256 of names and texts of the built-in documents."""
    digest = hashlib.sha256()
    for document in manual(split):
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return digest.hexdigest()


def baselines(tokenizer, text: corpus.Corpus) -> dict[str, dict[str, float]]:
    encode, vocabulary = document_encoder(tokenizer), len(tokenizer)
    documents = [encode(document).ids for document in manual("train")]
    unigram = unigram_probabilities(documents, vocabulary)
    counts = bigram_counts(documents, vocabulary)
    by_prior = {
        prior: table_nll((counts + prior * unigram) / (counts.sum(1, keepdims=True) + prior), text)
        for prior in PRIOR_COUNTS
    }
    best = min(by_prior, key=lambda prior: by_prior[prior].sum())
    flat = table_nll(np.broadcast_to(unigram, counts.shape), text)
    return {
        "unigram": figures(flat, text) | {"smoothing": "one added to each count"},
        "bigram": figures(by_prior[best], text)
        | {
            "smoothing": f"(count + {best} x unigram) / (total + {best}); {best} is the best of {PRIOR_COUNTS} on the "
            "held-out text itself, which favours the baseline; after BOS the unigram alone"
        },
    }


def card(work: Path) -> dict[str, object]:
    tokenizer = AutoTokenizer.from_pretrained(work / "model")
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32).eval()
    window = model.config.n_positions
    held_out = corpus.read("builtin:manual", tokenizer=tokenizer, window=window, tail="keep")
    train = corpus.read("builtin:manual-train", tokenizer=tokenizer, window=window, tail="keep")
    state = json.loads((work / "checkpoints" / "trainer_state.json").read_text())
    losses = [entry for entry in state["log_history"] if "train_runtime" in entry]
    return {
        "parameters": model.num_parameters(),
        "command": "OMP_NUM_THREADS=1 python experiments/builtin/train.py --work builtin-training",
        "seed": 0,
        "window": window,
        "steps": state["global_step"],
        "tokens_per_step": 8 * window,
        "minutes": round(losses[-1]["train_runtime"] / 60, 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "text": {
            "train": text_summary("train", train),
            "held_out": text_summary("held-out", held_out),
        },
        "weights_sha256": hashlib.sha256((work / "model" / "model.safetensors").read_bytes()).hexdigest(),
        "held_out_loss": {"model": figures(model_nll(model, held_out), held_out), **baselines(tokenizer, held_out)},
        "train_loss": figures(model_nll(model, train), train),
    }


def text_summary(split: str, text: corpus.Corpus) -> dict[str, object]:
    return {
        "text_sha256": text_hash(split),
        "tokens_sha256": text.hash,
        "documents": text.n_documents,
        "bytes": int(text.n_bytes.sum()),
        "tokens": int((text.lengths - 1).sum()),
    }


README = """# The built-in model

A decoder of {parameters:,} parameters (Hugging Face `gpt2`: 6 layers, 8 heads, d_model 112, context {window}), small
enough to ship and trained enough to have structure. It has read one thing: the manual that every CPython carries
(`pydoc_data.topics` and docstrings of the standard library). It is for trying rheoscope out and for tests.

Loss on {documents} documents of that manual that it was not trained on ({bytes:,} bytes, {tokens:,} tokens,
Python {python}):

| | nats/token | ± | bits/byte |
|---|---|---|---|
{rows}

± is the standard error over documents. Counts of the baselines come from the training text.
Unigram: {unigram}. Bigram: {bigram}.
The same model on its training text: {train} nats/token.

Tokens are byte-level BPE, 1,024 of them, merges learnt from the training text; every window begins with `<|bos|>`.
{steps:,} steps of {tokens_per_step:,} tokens with AdamW, seed {seed}, {minutes} minutes on one shared core:

    {command}

`card.json` holds these figures with the hashes of text, tokens and weights.
"""


def readme(written: dict) -> str:
    losses, held_out = written["held_out_loss"], written["text"]["held_out"]
    rows = "\n".join(
        f"| {name} | {loss['nats_per_token']:.3f} | {loss['se']:.3f} | {loss['bits_per_byte']:.3f} |"
        for name, loss in losses.items()
    )
    return README.format(
        rows=rows,
        unigram=losses["unigram"]["smoothing"],
        bigram=losses["bigram"]["smoothing"],
        train=f"{written['train_loss']['nats_per_token']:.3f}",
        minutes=f"{written['minutes']:.0f}",
        **{key: held_out[key] for key in ("documents", "bytes", "tokens")},
        **{
            key: written[key]
            for key in ("parameters", "python", "steps", "tokens_per_step", "seed", "command", "window")
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="the folder that train.py was given")
    work = parser.parse_args().work
    torch.set_num_threads(1)
    written = card(work)
    ZOO.mkdir(parents=True, exist_ok=True)
    for name in SHIPPED:
        shutil.copyfile(work / "model" / name, ZOO / name)
    (ZOO / "card.json").write_text(json.dumps(written, indent=2) + "\n")
    (ZOO / "README.md").write_text(readme(written))
    print(json.dumps(written["held_out_loss"], indent=2))


if __name__ == "__main__":
    main()
