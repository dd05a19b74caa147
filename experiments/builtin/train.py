"""The small decoder that ships in `rheoscope/nets/zoo/manual`, trained on the built-in text.

One command, about half an hour on one core; run it again after an interruption and it continues from its last
checkpoint:

    OMP_NUM_THREADS=1 python experiments/builtin/train.py --work builtin-training

`card.py` measures the result and writes it into the package.
"""

import argparse
import logging
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from rheoscope.corpus.manual import manual

WINDOW = 256
BATCH = 8
VOCABULARY = 1024
BOS = "<|bos|>"


class Crops(Dataset):
    """Random windows of the training documents, each beginning with BOS; window `index` depends on the seed alone."""

    def __init__(self, documents: list[list[int]], bos: int, n: int, *, seed: int) -> None:
        self.documents, self.bos, self.n, self.seed = [np.array(d) for d in documents], bos, n, seed
        self.ends = np.cumsum([len(d) for d in documents])

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = np.random.default_rng((self.seed, index))
        document = self.documents[np.searchsorted(self.ends, generator.integers(self.ends[-1]), side="right")]
        start = generator.integers(max(1, len(document) - WINDOW + 2))
        return padded(self.bos, document[start : start + WINDOW - 1])


class Windows(Dataset):
    """Every token of the held-out documents once, in windows that begin with BOS."""

    def __init__(self, documents: list[list[int]], bos: int) -> None:
        step = WINDOW - 1
        self.windows = [padded(bos, np.array(d[i : i + step])) for d in documents for i in range(0, len(d), step)]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.windows[index]


def padded(bos: int, tokens: np.ndarray) -> dict[str, torch.Tensor]:
    ids, labels = np.full(WINDOW, bos), np.full(WINDOW, -100)
    ids[1 : len(tokens) + 1] = labels[1 : len(tokens) + 1] = tokens
    return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def byte_level_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: the 256 bytes, BOS, and merges learnt from the training text. It covers any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=BOS, pad_token=BOS, model_max_length=WINDOW
    )


def train(work: Path, *, steps: int, seed: int) -> None:
    set_seed(seed)
    texts = [document.text for document in manual("train")]
    tokenizer = byte_level_tokenizer(texts)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    held_out = [tokenizer.encode(document.text, add_special_tokens=False) for document in manual("held-out")]
    # The same curve as GPT-2's own "gelu_new", in one kernel instead of eight.
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=WINDOW, n_embd=112, n_layer=6, n_head=8,
        activation_function="gelu_pytorch_tanh", resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    crops = Crops(ids, 0, steps * BATCH, seed=seed)
    logging.info(
        "parameters %d, training tokens %d, seen %.1f times, held-out tokens %d",
        model.num_parameters(), sum(map(len, ids)), len(crops) * WINDOW / sum(map(len, ids)), sum(map(len, held_out)),
    )  # fmt: skip
    trainer = Trainer(
        model,
        training_arguments(work / "checkpoints", steps=steps, seed=seed),
        train_dataset=crops,
        eval_dataset=Windows(held_out, 0),
    )
    checkpoints = work / "checkpoints"
    trainer.train(resume_from_checkpoint=get_last_checkpoint(checkpoints) if checkpoints.exists() else None)
    model.save_pretrained(work / "model")
    tokenizer.save_pretrained(work / "model")
    trainer.save_state()


def training_arguments(folder: Path, *, steps: int, seed: int) -> TrainingArguments:
    return TrainingArguments(
        str(folder), seed=seed, max_steps=steps, use_cpu=True,
        per_device_train_batch_size=BATCH, per_device_eval_batch_size=32,
        learning_rate=3e-3, adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.1, max_grad_norm=1.0,
        warmup_steps=steps // 20, lr_scheduler_type="cosine", logging_steps=50,
        eval_strategy="steps", eval_steps=500, save_steps=500, save_total_limit=2,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints and the result")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    train(options.work, steps=options.steps, seed=options.seed)


if __name__ == "__main__":
    main()
