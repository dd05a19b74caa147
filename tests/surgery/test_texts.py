"""Documents that a plan was chosen on are known again, and not verified on where others are left."""

import numpy as np
import pytest

from rheoscope.errors import RheoscopeError
from rheoscope.surgery.apply import carried_out
from rheoscope.surgery.edits_sinks import DropHeads
from rheoscope.surgery.plan import Plan, PlannedEdit
from rheoscope.surgery.prescribe import prescribe
from rheoscope.surgery.texts import KnownDocuments, parted, two_texts
from tests.instruments.texts import corpus_of, random_corpus
from tests.surgery.restructuring import single


def numbers(corpus):
    return set(corpus.documents.tolist())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_what_a_plan_was_chosen_on_is_fitted_on_and_the_rest_verifies(seed, share):
    text = random_corpus()
    choosing, _ = two_texts(text, share=share, seed=7)
    found = parted(text, KnownDocuments.of(choosing), seed=seed)
    assert numbers(choosing) <= numbers(found.calibration)
    assert not numbers(found.calibration) & numbers(found.checking)
    assert numbers(found.calibration) | numbers(found.checking) == numbers(text)
    assert found.n_known == 0
    assert found.calibration.n_windows >= text.n_windows / 2


def test_documents_are_known_again_in_windows_of_another_length_under_other_numbers():
    text = random_corpus(window=29)
    known = KnownDocuments.of(text.of_windows(np.flatnonzero(text.documents == 5)))
    (tokens,) = text.tokens[text.documents == 5]
    other = corpus_of([[*range(3, 48)], [*tokens, *range(3, 19)]])
    assert known.among(other) == [1]
    assert known.among(random_corpus(seed=1)) == []


def test_where_too_few_others_are_left_it_is_said_how_many_were_chosen_on():
    text = random_corpus()
    most = text.of_windows(np.flatnonzero(text.documents != 5))
    for known, left in ((most, {5}), (text, set())):
        found = parted(text, KnownDocuments.of(known))
        assert left <= numbers(found.checking)
        assert found.n_known == len(numbers(found.checking) - left) > 0


def test_a_plan_names_its_documents_and_edit_verifies_on_others_whatever_the_seed():
    view, text = single("llama"), random_corpus()
    choosing, _ = two_texts(text, share=0.5, seed=0)
    plan = prescribe(view, choosing, text, limit=5.0, only=["drop"], n_random=1).plan
    again = Plan.of_yaml(plan.to_yaml())
    assert again.chosen_on == KnownDocuments.of(choosing)
    found = carried_out(view, again, text, clock={"lengths": ()}, seed=1, n_random=0).verification
    assert found.n_chosen_on == 0
    rest = text.of_windows(np.flatnonzero(~np.isin(text.documents, list(numbers(choosing)))))
    assert found.text["hash"] == rest.hash
    found = carried_out(view, again, choosing, clock={"lengths": ()}, n_random=0).verification
    assert found.n_chosen_on > 0


def test_a_plan_without_documents_is_read_as_ever_and_wrong_ones_are_refused():
    plan = Plan.of_yaml("text: {windows: 3}\nedits: [{edit: DropAttention}]")
    assert plan.chosen_on is None
    for wrong in ("document_hashes: 3, hashed_tokens: 5", "document_hashes: [1], hashed_tokens: 5"):
        with pytest.raises(RheoscopeError, match=r"document_hashes is .*: give a list of texts"):
            Plan.of_yaml(f"text: {{{wrong}}}\nedits: [{{edit: DropAttention}}]")
    with pytest.raises(RheoscopeError, match="hashed_tokens is None: give a whole number"):
        Plan.of_yaml("text: {document_hashes: []}\nedits: [{edit: DropAttention}]")


def test_a_hash_that_looks_like_a_number_stays_a_text():
    plan = Plan(planned=(PlannedEdit(DropHeads(heads=((0, 0),))),), fingerprint="1234567890123e45")
    assert Plan.of_yaml(plan.to_yaml()).fingerprint == "1234567890123e45"
