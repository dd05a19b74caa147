"""The two ways rheoscope says no: bad input, and a question a model cannot answer."""


class RheoscopeError(Exception):
    """Bad input. One sentence: what was asked, what is the case, what to do. The command line exits with 2."""


class Refused(RheoscopeError):  # noqa: N818 - a refusal is an answer
    """A model has no such part, or the part is not handled. The sentence names the reason and the way out."""
