"""The three small networks that ship as `builtin:manual-softmax`, `builtin:manual-sd` and `builtin:manual-ega`.

One command trains what is missing, about three minutes for each on one core, measures all three on held-out text beside
unigram and bigram, and writes them into the package; run it again after an interruption and it goes on where it was:

    OMP_NUM_THREADS=1 python experiments/builtin/nets.py --work builtin-training
"""

import argparse
import hashlib
import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path

import torch
from card import baselines, figures, model_nll, text_summary
from transformers import AutoModelForCausalLM, AutoTokenizer

import rheoscope
from rheoscope import corpus
from rheoscope.nets.train import train

ZOO = Path(rheoscope.__path__[0]) / "nets" / "zoo"
SHIPPED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
COMMAND = "OMP_NUM_THREADS=1 python experiments/builtin/nets.py --work builtin-training"
KINDS = {
    "manual-softmax": ({"kind": "softmax"}, "Softmax attention with norms"),
    "manual-sd": ({"kind": "sd", "use_norm": False}, "S-D attention (skew scores less a damping) without any norm"),
    "manual-ega": ({"kind": "ega"}, "Energy-gated attention, gates over the tokens so far, with norms"),
}
RECIPE = {
    "size": "micro", "seed": 0, "window": 256, "batch": 4, "steps": 1200, "save_every": 400, "held_out": 0.02,
    "learning_rate": 2e-3, "precision": "float32",
}  # fmt: skip


def card(name: str, out: Path) -> dict[str, object]:
    """What is written beside the weights: losses beside baselines, and what it takes to make them again."""
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    read = {
        split: corpus.read(source, tokenizer=tokenizer, window=RECIPE["window"], tail="keep")
        for split, source in (("train", "builtin:manual-train"), ("held-out", "builtin:manual"))
    }
    record = json.loads((out / "training.json").read_text())
    return {
        "name": name,
        "parameters": model.num_parameters(),
        "command": COMMAND,
        "recipe": record["recipe"],
        "minutes": round(record["finished"]["seconds"] / 60, 1),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("torch", "transformers", "tokenizers")},
        "text": {split.replace("-", "_"): text_summary(split, text) for split, text in read.items()},
        "weights_sha256": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest(),
        "held_out_loss": {
            "model": figures(model_nll(model, read["held-out"]), read["held-out"]),
            **baselines(tokenizer, read["held-out"]),
        },
    }


README = """# builtin:{name}

{what}: a decoder of {parameters:,} parameters (`rheoscope_decoder`, size
micro: 4 layers, 4 heads, d_model 128, context {window}). Tokens are bytes. It is one of three networks that differ in
their attention alone, but that S-D goes without norms. They have read the manual that every CPython carries
(`pydoc_data.topics` and docstrings of the standard library), and are for trying rheoscope out and for tests.

Loss on {documents} documents of that manual that it was not trained on ({bytes:,} bytes, Python {python}):

| | nats/byte | ± | bits/byte |
|---|---|---|---|
{rows}

± is the standard error over documents. Counts of the baselines come from the training text.
Unigram: {unigram}. Bigram: {bigram}.

{steps:,} steps of {tokens:,} bytes with AdamW, seed {seed}, {minutes} minutes on one shared core:

    {command}

`card.json` holds these figures with the recipe and the hashes of text, tokens and weights.
"""


def readme(written: dict, what: str) -> str:
    losses, held_out, recipe = written["held_out_loss"], written["text"]["held_out"], written["recipe"]
    rows = "\n".join(
        f"| {name} | {loss['nats_per_token']:.3f} | {loss['se']:.3f} | {loss['bits_per_byte']:.3f} |"
        for name, loss in losses.items()
    )
    return README.format(
        what=what,
        rows=rows,
        unigram=losses["unigram"]["smoothing"],
        bigram=losses["bigram"]["smoothing"],
        minutes=f"{written['minutes']:.0f}",
        tokens=recipe["batch"] * recipe["window"],
        **{key: held_out[key] for key in ("documents", "bytes")},
        **{key: recipe[key] for key in ("window", "steps", "seed")},
        **{key: written[key] for key in ("name", "parameters", "python", "command")},
    )


def ship(name: str, out: Path, what: str) -> None:
    """Copy a trained network into the package with its card."""
    written = card(name, out)
    folder = ZOO / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in SHIPPED:
        shutil.copyfile(out / file, folder / file)
    (folder / "card.json").write_text(json.dumps(written, indent=2) + "\n")
    (folder / "README.md").write_text(readme(written, what))
    print(name, json.dumps(written["held_out_loss"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the training runs")
    work = parser.parse_args().work
    torch.set_num_threads(1)
    for name, (recipe, what) in KINDS.items():
        out = work / name
        train(text="builtin:manual-train", out=out, progress=True, **RECIPE, **recipe)
        ship(name, out, what)


if __name__ == "__main__":
    main()
