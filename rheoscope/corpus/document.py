"""A document: the unit over which standard errors are taken."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """A piece of text that no window crosses, and the name it goes by in messages."""

    name: str
    text: str
