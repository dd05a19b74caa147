"""Training runs that are refused, before a folder is made or with what is there left as it is."""

import pytest

from rheoscope.errors import RheoscopeError

from .conftest import short
from .test_train import contents


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "softmax"}, "holds a run of kind 'sd' and 'softmax' was asked for"),
        ({"tokenizer": "bpe:290"}, "was begun with a vocabulary of 257 tokens, and this tokenizer has 290"),
        ({"window": 16}, "was begun with another text or window"),
        ({"learning_rate": 0.5}, r"was begun with learning_rate = 0.001, and 0.5 was asked for"),
        ({"head_dims": 8}, "was begun with head_dims = None, and 8 was asked for"),
    ],
)
def test_another_run_in_the_same_folder_is_refused_and_nothing_overwritten(trained, text, changes, message):
    before = contents(trained.folder)
    asked = {"kind": "sd", "dropout": 0.1} | changes
    with pytest.raises(RheoscopeError, match=message):
        short(asked.pop("kind"), text, trained.folder, **asked)
    assert contents(trained.folder) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 100_000}, "no window of 100000 tokens fits"),
        ({"batch": 5000}, "a batch of 5000 was asked"),
        ({"head_dims": 129}, "d_head 129 asked for in layer 0"),
        ({"head_dims": [8, 8]}, "head_dims has 2 entries for 4 layers"),
        ({"n_heads": 5}, "hidden_size 128 is not a multiple of 5 heads"),
        ({"size": "8M"}, "no size is called '8M'"),
        ({"steps": 0}, "steps 0 asked for"),
        ({"save_every": 5}, "save_every 5 is not a multiple of log_every 2"),
        ({"held_out": 1.0}, "held_out 1.0 asked for"),
        ({"held_out": float("nan")}, "held_out nan asked for"),
        ({"window": 1}, "window 1 asked for; it must be at least 2"),
        ({"n_heads": 0}, "n_heads 0 asked for"),
        ({"learning_rate": -1.0}, "learning_rate -1.0 asked for; it must be a finite number above 0"),
        ({"learning_rate": 0.0}, "learning_rate 0.0 asked for"),
        ({"learning_rate": float("nan")}, "learning_rate nan asked for"),
        ({"learning_rate": float("inf")}, "learning_rate inf asked for"),
        ({"initializer_range": 0.0}, "initializer_range 0.0 asked for"),
        ({"dropout": 1.0}, "dropout 1.0 asked for; it must be at least 0 and below 1"),
        ({"warmup": -0.1}, "warmup -0.1 asked for"),
        ({"warmup": float("nan")}, "warmup nan asked for"),
        ({"seed": -1}, "seed -1 asked for"),
        ({"probe_every": 0}, "every 0 steps asked for"),
        ({"precision": "fp8"}, "no precision is called 'fp8'"),
        ({"tokenizer": "bpe:12"}, "bpe:N needs a number N of tokens above 256"),
        ({"tokenizer": "bpe:" + "9" * 5000}, r"tokens above 256 and below 2\^31"),
        ({"tokenizer": "bpe:9999"}, "the text yields [0-9]+ tokens at most"),
    ],
)
def test_a_recipe_that_does_not_fit_is_refused_before_a_folder_is_made(text, tmp_path, changes, message):
    with pytest.raises(RheoscopeError, match=message):
        short("sd", text, tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()


def test_text_from_standard_input_is_refused(tmp_path):
    with pytest.raises(RheoscopeError, match="standard input"):
        short("softmax", "-", tmp_path / "new")


def test_an_unknown_kind_or_tokenizer_is_refused_before_a_folder_is_made(text, tmp_path):
    with pytest.raises(RheoscopeError, match="no attention kind is called 's-d'"):
        short("s-d", text, tmp_path / "new")
    with pytest.raises(RheoscopeError, match=r"tokenizer '.*nowhere' cannot be opened"):
        short("sd", text, tmp_path / "new", tokenizer=str(tmp_path / "nowhere"))
    assert not (tmp_path / "new").exists()


def test_a_folder_with_other_things_in_it_is_refused(text, tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(RheoscopeError, match="holds files but no training run"):
        short("sd", text, tmp_path)
    (tmp_path / "training.json").write_text("[]")
    with pytest.raises(RheoscopeError, match="is not the record of a training run"):
        short("sd", text, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letter.txt", "training.json"]
