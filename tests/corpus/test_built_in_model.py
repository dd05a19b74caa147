import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rheoscope
from rheoscope import corpus

ZOO = Path(rheoscope.__path__[0]) / "nets" / "zoo" / "manual"
CARD = json.loads((ZOO / "card.json").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ZOO)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(ZOO, dtype=torch.float32).eval()


def held_out(tokenizer, **options):
    return corpus.read("builtin:manual", tokenizer=tokenizer, window=256, tail="keep", **options)


def nats_per_token(model, text):
    """Mean loss of the scored tokens, written out."""
    total, n = 0.0, 0
    with torch.inference_mode():
        for tokens, length in zip(text.tokens, text.lengths, strict=True):
            ids = torch.tensor(tokens[:length], dtype=torch.int64)
            log_probs = model(input_ids=ids[None]).logits[0].double().log_softmax(-1)
            total -= sum(log_probs[i, ids[i + 1]].item() for i in range(length - 1))
            n += length - 1
    return total / n


def test_every_window_of_the_built_in_text_begins_with_bos_once(tokenizer):
    text = held_out(tokenizer)
    assert (text.tokens[:, 0] == text.bos_id).all()
    valid = np.arange(text.window) < text.lengths[:, None]
    assert (text.tokens[valid] == text.bos_id).sum() == text.n_windows


def test_the_built_in_tokenizer_reads_any_text_back(tokenizer):
    text = "thé çat — 🐈\n\n\t<|bos|> sat \0"
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_the_built_in_model_knows_its_language_far_better_than_bigrams(model, tokenizer):
    text = held_out(tokenizer, windows_per_document=2)
    assert text.n_documents > 20
    assert nats_per_token(model, text) < CARD["held_out_loss"]["bigram"]["nats_per_token"] - 0.5


def test_the_built_in_model_is_causal(model, tokenizer):
    ids = torch.tensor(held_out(tokenizer, n_windows=1).tokens, dtype=torch.int64)
    changed = ids.clone()
    changed[:, 100] = (ids[:, 100] + 1) % len(tokenizer)
    with torch.inference_mode():
        before, after = model(input_ids=ids).logits, model(input_ids=changed).logits
    assert torch.equal(before[:, :100], after[:, :100])
    assert not torch.equal(before[:, 100:], after[:, 100:])


def test_the_figures_on_the_card_are_found_again(model, tokenizer):
    card = CARD["held_out_loss"]["model"]
    # Python's manual changes with its version, and with it the held-out text and its loss.
    same_text = held_out(tokenizer).hash == CARD["text"]["held_out"]["tokens_sha256"]
    tolerance = 1e-3 if same_text else 0.2
    assert nats_per_token(model, held_out(tokenizer)) == pytest.approx(card["nats_per_token"], abs=tolerance)


def test_the_built_in_model_is_small():
    assert sum(path.stat().st_size for path in ZOO.iterdir()) < 5_000_000
