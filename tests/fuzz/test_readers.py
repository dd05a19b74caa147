"""Damaged and hostile files are read or refused in one sentence: nothing else is raised, written, or taken."""

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from .readers import READERS, inputs
from .trial import Trial

EXAMPLES = {"text": 150, "jsonl": 150, "parquet": 150, "plan": 150, "run": 12}  # a run takes longest
OF_MODELS = 40  # each is a model opened


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_are_read_or_refused(name, tmp_path):
    trial = Trial(READERS[name], tmp_path)
    outcomes = set()

    @given(inputs(READERS[name], tmp_path))
    @settings(
        max_examples=EXAMPLES.get(name, OF_MODELS),
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def fuzz(chosen):
        outcomes.add(trial(chosen.name, chosen.content))

    fuzz()
    assert outcomes  # something was tried


@pytest.mark.parametrize("name", READERS)
def test_whole_files_are_read(name, tmp_path):
    trial = Trial(READERS[name], tmp_path)
    for file, content in trial.whole.items():
        assert trial(file, content) == "read"
