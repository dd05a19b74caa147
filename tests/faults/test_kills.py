"""Commands killed, or stopped by Ctrl-C, at random moments leave nothing half-written, and are finished afterwards."""

import random
import signal

import pytest

from .commands import COMMANDS, fresh, struck
from .kills import killed, reference_of

SEED = 0
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no kill -9 here")]


@pytest.mark.parametrize("name", COMMANDS)
def test_kill_9_at_a_random_moment(name, base, tmp_path):
    found = killed(COMMANDS[name], base, tmp_path, n=4, seed=SEED)
    assert found["killed"] >= 2


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_a_random_moment_ends_in_130_and_leaves_no_piece(name, base, tmp_path):
    command = COMMANDS[name]
    seconds = reference_of(command, base, tmp_path).seconds
    moments, codes = random.Random(SEED), set()
    for number in range(4):
        folder = fresh(base, tmp_path / str(number))
        code = struck(command, folder, 1, after=moments.uniform(0.2, 0.9) * seconds, by=signal.SIGINT)
        codes.add(code)
        if code:
            assert code == 130, (folder / "log.txt").read_text()
            assert "Traceback" not in (folder / "log.txt").read_text()
        new = {path.name for path in folder.iterdir()} - {path.name for path in base.iterdir()} - {"log.txt"}
        assert new <= {command.output, f"{command.output}.partial"}
        assert command.output not in new or command.name == "train" or code == 0
    assert 130 in codes
