"""An edited folder in lm-evaluation-harness: its sums of log-probabilities are ours, and it generates what we do."""

import pytest
import torch

import rheoscope
from rheoscope.surgery.edits_linear import Linearize
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.edits_structure import Parallelize
from rheoscope.surgery.restructure import restructured
from rheoscope.surgery.save import save_edited

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of lm-eval and of what it imports
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('lm_eval')", reason="lm-eval is not installed"),
]
CONTEXTS = ("The list", "Returns a new dictionary with the keys of", "A")
CONTINUATIONS = (" of names", " the mapping and their values", " class is a type of an object that has methods")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    view = rheoscope.load("builtin:manual-softmax")
    edits = [
        DropHeads(heads=tuple((1, head) for head in range(view.n_heads // view.n_kv_heads))),
        Linearize(layers=(2,), scaled=True),
        Parallelize(layers=(3,)),
    ]
    return save_edited(restructured(view, edits), view.tokenizer, tmp_path_factory.mktemp("lm_eval") / "edited")


@pytest.fixture(scope="module")
def harness(folder):
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=str(folder), device="cpu", batch_size=2, dtype="float32")


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=one, idx=place) for place, one in enumerate(arguments)]


def log_probabilities(model, ids, n_scored):
    """Of the last tokens of a text, added up, and whether each is the most probable one."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    rows, targets = logits[-n_scored:], torch.tensor(ids[-n_scored:])
    return float(rows.gather(1, targets[:, None]).sum()), bool((rows.argmax(-1) == targets).all())


def test_log_likelihoods_of_continuations_are_ours(folder, harness):
    mine = rheoscope.load(folder)
    pairs = list(zip(CONTEXTS, CONTINUATIONS, strict=True))
    found = harness.loglikelihood(requests("loglikelihood", pairs))
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        whole = harness.tok_encode(context + continuation)
        n_scored = len(whole) - len(harness.tok_encode(context))
        expected, best = log_probabilities(mine.model, whole, n_scored)
        assert total == pytest.approx(expected, abs=1e-4)
        assert greedy == best


def test_the_log_likelihood_of_a_text_is_our_loss(folder, harness):
    mine = rheoscope.load(folder)
    texts = [context + continuation for context, continuation in zip(CONTEXTS, CONTINUATIONS, strict=True)]
    found = harness.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in texts]))
    for text, total in zip(texts, found, strict=True):
        ids = mine.tokenizer(text, add_special_tokens=False)["input_ids"]
        expected, _ = log_probabilities(mine.model, [harness.prefix_token_id, *ids], len(ids))
        assert total == pytest.approx(expected, abs=1e-4)


def test_it_generates_what_the_model_generates_alone(folder, harness):
    options = {"until": ["\n\n\n\n"], "max_gen_toks": 12, "do_sample": False}
    found = harness.generate_until(requests("generate_until", [(context, dict(options)) for context in CONTEXTS]))
    mine = rheoscope.load(folder)
    for context, said in zip(CONTEXTS, found, strict=True):
        ids = torch.tensor([harness.tok_encode(context)])
        made = mine.model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert said == mine.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
