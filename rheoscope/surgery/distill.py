"""Wins loss back by a short training of the edited model: towards the original's stream, and towards the text.

Every layer's output is matched with the original's, relative to its length, and the next token is predicted. What is
inside the layers is trained; embeddings, output head and final norm stay. Bounded by steps or by minutes; with a file
to keep it in, a distillation that was stopped goes on to the same numbers.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from rheoscope.corpus import Batch, Corpus, batches
from rheoscope.errors import RheoscopeError
from rheoscope.instruments.engine import Progress, silent
from rheoscope.instruments.scale import configuration_of
from rheoscope.models.placement import stored
from rheoscope.models.view import ModelView
from rheoscope.storage import replacing
from rheoscope.surgery.adapters import adapters
from rheoscope.surgery.edited_model import EditedForCausalLM

KEPT_EVERY = 60.0  # seconds between two states in the file
WARM_UP = 20  # steps
HALF = (torch.bfloat16, torch.float16)
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # what AdamW keeps of a parameter


@dataclass(frozen=True)
class Distillation:
    """How long and how: AdamW on batches of windows in an order drawn anew every epoch.

    steps, minutes: whichever ends first; one of them must be given. match: weight of the layers' outputs beside the
    loss of the next token. lora_rank: of adapters that are trained in place of the weights and merged into them at the
    end; every weight is trained without.
    """

    steps: int | None = None
    minutes: float | None = None
    rate: float = 1e-4
    windows: int = 2  # per step
    match: float = 1.0
    seed: int = 0
    lora_rank: int | None = None


@dataclass
class Distilled:
    """What was done: steps in all, and the training loss (next token, match) of every step of this process."""

    steps: int = 0
    losses: list[tuple[float, float]] = field(default_factory=list)


def distil(
    view: ModelView,
    edited: EditedForCausalLM,
    text: Corpus,
    settings: Distillation,
    *,
    memory: Path | None = None,
    progress: Progress = silent,
) -> Distilled:
    """Train the edited model in place. Raises RheoscopeError for no bound, or a memory of something else."""
    if settings.steps is None and settings.minutes is None:
        raise RheoscopeError("a distillation without an end asked for: give steps or minutes")
    key = "" if memory is None else _key(view, edited, text, settings)
    rank = settings.lora_rank
    with nullcontext(trainable(edited)) if rank is None else adapters(edited, rank, seed=settings.seed) as trained:
        training = _Training(trained, key)
        if memory is not None and memory.exists():
            training.restore(memory)
        result, ends = Distilled(training.steps), _deadline(settings)
        kept = time.monotonic()
        with _learning(edited, trained):
            while (settings.steps is None or training.steps < settings.steps) and time.monotonic() < ends:
                losses = _losses(view, edited, _batch(text, settings, training.steps))
                training.step(losses[0] + settings.match * losses[1], settings.rate)
                result.losses.append((float(losses[0].detach()), float(losses[1].detach())))
                progress("distillation", training.steps, settings.steps or training.steps)
                if memory is not None and time.monotonic() - kept > KEPT_EVERY:
                    training.keep(memory)
                    kept = time.monotonic()
        if memory is not None:
            training.keep(memory)
    result.steps = training.steps
    return result


def trainable(edited: EditedForCausalLM) -> dict[str, nn.Parameter]:
    """Parameters inside the layers, by name."""
    inside = {id(parameter) for block in edited.blocks for parameter in block.parameters()}
    return {name: p for name, p in edited.named_parameters() if id(p) in inside and p.is_floating_point()}


@contextmanager
def _learning(edited: EditedForCausalLM, trained: dict[str, nn.Parameter]) -> Iterator[None]:
    """Gradients for what is trained alone; as before afterwards. Without dropout, so that both models are exact."""
    before = {name: parameter.requires_grad for name, parameter in edited.named_parameters()}
    try:
        for name, parameter in edited.named_parameters():
            parameter.requires_grad_(name in trained)
        with torch.enable_grad():
            yield
    finally:
        for name, parameter in edited.named_parameters():
            parameter.requires_grad_(before[name])
            parameter.grad = None


def _losses(view: ModelView, edited: EditedForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Loss of the next token, and mean over layers of |h' - h|² / |h|² over real tokens."""
    with torch.no_grad(), _outputs(view.blocks) as wanted:
        view.forward(batch.tokens, batch.valid, head=False)
    device = edited.device
    valid = batch.valid.to(device)
    with _outputs(edited.blocks) as found:
        inputs = {"input_ids": batch.tokens.to(device), "attention_mask": valid.long()}
        logits = edited(**inputs, use_cache=False).logits
    scored = valid[:, 1:]
    targets = batch.tokens[:, 1:].to(device)
    nll = nn.functional.cross_entropy(logits[:, :-1][scored].float(), targets[scored])
    parts = []
    for h, other in zip(wanted, found, strict=True):
        h, other = h[valid.to(h.device)].to(device).float(), other[valid].float()
        parts.append(((other - h).square().sum(-1) / h.square().sum(-1).clamp(min=1e-12)).mean())
    return nll, torch.stack(parts).mean()


@contextmanager
def _outputs(blocks: list[nn.Module]) -> Iterator[list[Tensor]]:
    """What every block hands on while the block lasts, in order."""
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple, output: object) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    with ExitStack() as undo:
        for block in blocks:
            undo.callback(block.register_forward_hook(keep).remove)
        yield kept


def _batch(text: Corpus, settings: Distillation, step: int) -> Batch:
    """The windows of one step: every epoch has an order of its own, drawn from seed and epoch alone."""
    size = min(settings.windows, text.n_windows)
    per_epoch = text.n_windows // size
    epoch, place = divmod(step, per_epoch)
    order = np.random.default_rng([settings.seed, epoch]).permutation(text.n_windows)
    return next(batches(text.of_windows(order[place * size : (place + 1) * size]), size))


def _deadline(settings: Distillation) -> float:
    return float("inf") if settings.minutes is None else time.monotonic() + 60 * settings.minutes


def _key(view: ModelView, edited: EditedForCausalLM, text: Corpus, settings: Distillation) -> str:
    """What a memory is of: both models at the start, edits, text and settings, but not how long."""
    said = asdict(settings) | {"steps": None, "minutes": None, "model": configuration_of(view)}
    digest = hashlib.sha256(json.dumps((edited.config.rounds, text.hash, said)).encode())
    for model in (view.model, edited):
        for name, parameter in stored(model):
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            flat = parameter.detach().contiguous().cpu().reshape(-1)
            digest.update(memoryview(flat.view(torch.uint8).numpy()))
    return digest.hexdigest()


def refuse_memory(path: Path) -> None:
    """Raise RheoscopeError for a file that keeps something else than a distillation, before there is one."""
    if not path.exists():
        return
    try:
        with safe_open(path, "pt") as file:
            if "key" not in (file.metadata() or {}):
                raise _unreadable(path)
    except (OSError, SafetensorError) as error:
        raise _unreadable(path) from error


def _unreadable(path: Path) -> RheoscopeError:
    return RheoscopeError(f"{path} keeps no distillation that can be read: name another file")


@dataclass
class _Training:
    """What is trained, by name, how, and how far it is. key: what a file that keeps it has to be of.

    masters: what AdamW works on. Parameters of half precision have float32 copies, to which they are rounded after
    every step: a step of 1e-4 is less than half the distance of two bfloat16 numbers above 0.03, and would be lost.
    """

    trained: dict[str, nn.Parameter]
    key: str
    steps: int = 0
    masters: dict[str, nn.Parameter] = field(init=False)
    optimiser: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.masters = {
            name: nn.Parameter(p.detach().float()) if p.dtype in HALF else p for name, p in self.trained.items()
        }
        self.optimiser = torch.optim.AdamW(self.masters.values(), weight_decay=0.0)

    def step(self, loss: Tensor, rate: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = rate * min(1.0, (self.steps + 1) / WARM_UP)
        self.optimiser.zero_grad()
        loss.backward()
        for name, parameter in self._rounded():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self.masters.values(), 1.0)
        self.optimiser.step()
        self._round()
        self.steps += 1

    def _rounded(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that are not their own masters."""
        return [(name, p) for name, p in self.trained.items() if self.masters[name] is not p]

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._rounded():
            parameter.copy_(self.masters[name])

    def keep(self, path: Path) -> None:
        """Write masters and moments, whole or not at all."""
        tensors = {f"parameter {name}": p.detach().cpu().contiguous() for name, p in self.masters.items()}
        for name, parameter in self.masters.items():
            state = self.optimiser.state.get(parameter, {})
            tensors |= {f"{what} {name}": value.detach().cpu().contiguous() for what, value in state.items()}
        with replacing(path, overwrite=True) as part:
            save_file(tensors, part, metadata={"key": self.key, "steps": str(self.steps)})

    def restore(self, path: Path) -> None:
        """Put back what `keep` wrote."""
        try:
            with safe_open(path, "pt") as file:
                said = file.metadata() or {}
                if said.get("key") != self.key:
                    raise RheoscopeError(
                        f"{path} keeps the distillation of another model, plan or text, or one that began from other "
                        "weights, as without the refit: name another file"
                    )
                for name, parameter in self.masters.items():
                    parameter.data.copy_(file.get_tensor(f"parameter {name}"))
                    held = [what for what in MOMENTS if f"{what} {name}" in file.keys()]  # noqa: SIM118
                    if held:
                        state = {what: file.get_tensor(f"{what} {name}") for what in held}
                        self.optimiser.state[parameter] = {
                            what: value if what == "step" else value.to(parameter) for what, value in state.items()
                        }
                self._round()
                self.steps = int(said["steps"])
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise _unreadable(path) from error
