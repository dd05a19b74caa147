"""The two ways rheoscope says no: bad input, and a question a model cannot answer."""

LONGEST_QUOTED = 200  # characters of a line that is quoted from another program's message
LONGEST = 2000  # characters of a sentence; file names, keys and values that it quotes may be longer


class RheoscopeError(Exception):
    """Bad input. One sentence: what was asked, what is the case, what to do. The command line exits with 2.

    What it quotes of a file may be hostile: line breaks, control characters and the like are spelled out, and the
    middle of what is too long is left out.
    """

    def __init__(self, sentence: str):
        plain = "".join(letter if letter.isprintable() else _spelled(letter) for letter in _shortened(sentence))
        super().__init__(plain)


class Refused(RheoscopeError):  # noqa: N818 - a refusal is an answer
    """A model has no such part, or the part is not handled. The sentence names the reason and the way out."""


def first_line(error: BaseException) -> str:
    """The first line of a foreign message, without its full stop; the kind of error where it says nothing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0].rstrip(".: ") if lines else type(error).__name__
    line = f"no entry {line}" if isinstance(error, KeyError) else line
    return line if len(line) <= LONGEST_QUOTED else line[:LONGEST_QUOTED] + "…"


def _shortened(sentence: str) -> str:
    half = LONGEST // 2
    return sentence if len(sentence) <= LONGEST else f"{sentence[:half]} … {sentence[-half:]}"


def _spelled(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


class Stopped(RheoscopeError):  # noqa: N818 - it is what was asked for
    """A run was told to stop from outside. The command line exits with 143."""
