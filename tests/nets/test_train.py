"""Training runs: what they leave behind, that a killed one goes on to the same numbers, and what is refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from rheoscope.errors import RheoscopeError
from rheoscope.nets.folder import last_checkpoint
from rheoscope.nets.train import train
from rheoscope.nets.trainer import NetTrainer, read_curve

from .conftest import TEXT, short

ROOT = Path(__file__).parents[2]


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def in_another_process(text, out, *, kill_at=0, launcher=(), **changes):
    """`short` in a fresh process, which kills itself with SIGKILL at the end of a step if asked to."""
    code = f"""
import os, signal
from rheoscope.nets import trainer
from tests.nets.conftest import short
class Kill(trainer.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == {kill_at}:
            os.kill(os.getpid(), signal.SIGKILL)
original = trainer.NetTrainer.__init__
def patched(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.add_callback(Kill())
trainer.NetTrainer.__init__ = patched
from rheoscope.nets.ranks import training_ranks
probe = None if {changes!r}.get("trainer_options") else training_ranks  # a sharded model has no whole layers to read
short("sd", {str(text)!r}, {str(out)!r}, probe=probe, probe_every=5, **{changes!r})
"""
    script = out.parent / f"{out.name}.py"
    script.write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_a_finished_run_is_an_ordinary_checkpoint_with_its_tokenizer(trained):
    model = AutoModelForCausalLM.from_pretrained(trained.folder)
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    assert model.config.attention == ["sd"] * 4
    assert tokenizer.decode(tokenizer("the hill: ä")["input_ids"]) == "the hill: ä"
    assert len(tokenizer) == model.config.vocab_size == 257
    assert sorted(path.name for path in trained.folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "loss.csv",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]


def test_the_curve_holds_the_loss_of_every_log_the_held_out_loss_and_the_probe(trained):
    curve = trained.curve
    losses = curve.dropna(subset="loss")
    assert losses.step.tolist() == list(range(2, 25, 2))
    assert losses.loss.iloc[-1] == trained.loss < 0.8 * losses.loss.iloc[0]
    held_out = curve.dropna(subset="held_out_loss")
    assert held_out.step.tolist() == [6, 12, 18, 24]
    assert held_out.held_out_loss.iloc[-1] == trained.held_out_loss
    probed = curve.dropna(subset="routing_k90_0")
    assert probed.step.tolist() == [0, 5, 10, 15, 20]
    assert (probed[[f"routing_k90_{layer}" for layer in range(4)]] >= 2).all().all()
    assert probed.damping_mean_0.iloc[0] == pytest.approx(0.69, abs=0.05)  # about softplus(0)


def test_the_held_out_loss_is_that_of_the_saved_model_on_the_last_windows(trained):
    model = AutoModelForCausalLM.from_pretrained(trained.folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained.folder)
    ids = tokenizer(TEXT)["input_ids"]
    windows = [ids[start : start + 31] for start in range(0, len(ids) - 30, 31)]
    held_out = torch.tensor([[tokenizer.bos_token_id, *window] for window in windows[-round(len(windows) / 10) :]])
    with torch.no_grad():
        assert model(held_out, labels=held_out).loss.item() == pytest.approx(trained.held_out_loss, abs=1e-5)


def test_a_run_killed_at_any_point_goes_on_to_the_same_curve_and_weights_bit_for_bit(trained, text, tmp_path):
    out = tmp_path / "killed"
    killed = in_another_process(text, out, kill_at=15, dropout=0.1)
    assert killed.returncode == -signal.SIGKILL
    assert last_checkpoint(out).name == "checkpoint-12"
    # A second kill, this time amid the writing of a checkpoint.
    shutil.copytree(out / "checkpoint-12", out / "checkpoint-18")
    (out / "checkpoint-18" / "trainer_state.json").write_text('{"global_step": 1')
    assert last_checkpoint(out).name == "checkpoint-12"
    resumed = in_another_process(text, out, dropout=0.1)
    assert resumed.returncode == 0, resumed.stderr
    for name in ("loss.csv", "model.safetensors"):
        assert (out / name).read_bytes() == (trained.folder / name).read_bytes()


@pytest.mark.slow
def test_a_run_killed_after_its_last_step_only_has_to_be_written(trained, text, tmp_path):
    out = tmp_path / "late"
    assert in_another_process(text, out, kill_at=24, dropout=0.1).returncode == -signal.SIGKILL
    assert in_another_process(text, out, dropout=0.1).returncode == 0
    assert (out / "model.safetensors").read_bytes() == (trained.folder / "model.safetensors").read_bytes()


def interrupted(*_):
    raise KeyboardInterrupt


def test_a_run_stopped_between_its_last_step_and_its_files_has_the_same_curve(text, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    short("sd", text, whole, steps=25)  # not where an epoch ends
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[train.__module__], "put_in_place", interrupted)
        with pytest.raises(KeyboardInterrupt):
            short("sd", text, stopped, steps=25)
    assert last_checkpoint(stopped).name == "checkpoint-25"
    assert short("sd", text, stopped, steps=25).steps == 25
    for name in ("loss.csv", "model.safetensors"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes()
    assert not (stopped / "unfinished").exists()


def test_a_finished_run_asked_for_again_is_returned_untouched(trained, text):
    before = contents(trained.folder)
    again = short("sd", text, trained.folder, dropout=0.1)
    assert again == trained
    assert contents(trained.folder) == before


def test_the_seed_decides_the_numbers(text, tmp_path):
    one, same, other = (
        short("softmax", text, tmp_path / str(i), seed=seed, steps=6) for i, seed in enumerate((1, 1, 2))
    )
    pd.testing.assert_frame_equal(one.curve, same.curve)
    assert one.loss != other.loss


TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node=2")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options"),
    [(TORCHRUN, {}), (ACCELERATE, {}), (TORCHRUN, {"fsdp": True})],
    ids=["torchrun", "accelerate", "sharded"],
)
def test_two_processes_give_the_loss_of_one_at_equal_global_batch(text, tmp_path, launcher, options):
    alone = short("sd", text, tmp_path / "one")
    done = in_another_process(text, tmp_path / "two", launcher=launcher, trainer_options=options)
    assert done.returncode == 0, done.stderr
    one, two = (curve.set_index("step") for curve in (alone.curve, read_curve(tmp_path / "two")))
    for name in ("loss", "held_out_loss"):
        difference = one[name].dropna() - two[name].dropna()
        assert difference.notna().all()
        assert difference.abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["sd_linear", "sd", "softmax"])
def test_divergence_is_one_sentence_and_leaves_no_weights(text, tmp_path, kind):
    out = tmp_path / "run"
    with pytest.raises(RheoscopeError, match=r"training diverged: the (loss|gradient) is (nan|inf) at step \d+"):
        short(kind, text, out, use_norm=False, learning_rate=1e6)
    assert not list(out.rglob("*.safetensors"))


def test_a_run_of_fewer_steps_than_a_log_interval_is_logged_at_its_end(text, tmp_path):
    run = short("softmax", text, tmp_path / "run", steps=3, log_every=10, save_every=20)
    assert run.curve.dropna(subset="loss").step.tolist() == [3]


def test_only_matrices_decay(text, tmp_path):
    taken = {}

    def note(model, _windows):
        taken["model"] = model
        return {}

    short(["ega", "sd", "lag_conv", "elu"], text, tmp_path / "run", steps=2, positions="morlet", probe=note)
    trainer = NetTrainer(taken["model"], TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))
    decayed = set(trainer.get_decay_parameter_names(taken["model"]))
    parameters = dict(taken["model"].named_parameters(remove_duplicate=False))
    assert decayed == {name for name, parameter in parameters.items() if parameter.ndim > 1}
    assert not any("gate_" in name or "frequency" in name or "norm" in name for name in decayed)


def test_byte_pairs_are_learned_from_the_text(text, tmp_path):
    run = short("elu", text, tmp_path / "run", tokenizer="bpe:280", steps=4)
    tokenizer = AutoTokenizer.from_pretrained(run.folder)
    assert len(tokenizer) == 280
    assert len(tokenizer(TEXT)["input_ids"]) < len(TEXT) / 2
    assert json.loads((run.folder / "training.json").read_text())["vocabulary"] == 280


def test_bf16_gives_the_loss_of_float32_within_half_a_percent(text, tmp_path):
    for kind in ("sd", "elu"):
        full = short(kind, text, tmp_path / f"{kind}32")
        half = short(kind, text, tmp_path / f"{kind}16", precision="bf16")
        assert half.loss == pytest.approx(full.loss, rel=5e-3)


def test_progress_without_a_terminal_is_some_twenty_lines(text, tmp_path, capfd):
    train(
        "softmax",
        text=text,
        out=tmp_path / "run",
        steps=60,
        window=16,
        batch=4,
        log_every=1,
        save_every=60,
        progress=True,
    )
    lines = capfd.readouterr().err.splitlines()
    assert 15 <= len(lines) <= 22
    assert lines[0].startswith("step 1 of 60, loss 5.")
