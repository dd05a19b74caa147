"""Files that are nearly right: whole ones with a few bytes, or a few values, changed."""

import copy
import json
from typing import Any

from hypothesis import strategies as st

# What readers have stumbled over: ends of ranges, sizes nobody has, bytes that are no text, code in data.
NUMBERS = (
    0,
    1,
    2,
    127,
    255,
    2**15,
    2**16 - 1,
    2**24,
    2**28,
    2**30,
    2**31 - 1,
    2**32 - 1,
    2**40,
    2**60,
    2**63,
    2**64 - 1,
)
SNIPPETS = (
    *(
        b"",
        b"\0",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        b"\r",
        b"\n\n",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"'",
        b'"',
        b"\\u",
    ),
    *(b"{", b"[" * 2000, b'{"a":' * 500, b"}", b"\\ud800", b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"\\u"),
    *(
        b"!!python/object/apply:os.system [id]",
        b"&a [*a]",
        b"<<: *a",
        b"? [a]: b",
        b"!!binary x",
        b"2026-01-01",
        b"---\n",
    ),
    *(b"../../../etc/passwd", b"/etc/passwd", b"%s%n", b"</script><script>alert(1)</script>"),
)
WORDS = (
    "",
    "\0",
    "é",
    "🐈" * 50,
    "\u202e",
    "../../../etc/passwd",
    "/dev/zero",
    "os.system",
    "nan",
    "x" * 10_000,
    "</script>",
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([*NUMBERS, *(-number for number in NUMBERS)]),
    st.integers(-3, 70),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)


@st.composite
def mutated_bytes(draw: st.DrawFn, content: bytes, *, head: int = 512) -> bytes:
    """The content with one to five changes, half of them among the first `head` bytes."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 5))):
        limit = draw(st.sampled_from([min(head, len(data)), len(data)]))
        at = draw(st.integers(0, limit))
        _change(draw, data, at)
    return bytes(data)


def _change(draw: st.DrawFn, data: bytearray, at: int) -> None:
    kind = draw(st.sampled_from(["bit", "number", "cut", "end", "repeat", "snippet", "noise"]))
    if kind == "bit" and at < len(data):
        data[at] ^= 1 << draw(st.integers(0, 7))
    elif kind == "number":
        width = draw(st.sampled_from([1, 2, 4, 8]))
        number = draw(st.sampled_from(NUMBERS)) % 2 ** (8 * width)
        data[at : at + width] = number.to_bytes(width, draw(st.sampled_from(["little", "big"])))
    elif kind == "cut":
        del data[at : at + draw(st.integers(1, 40))]
    elif kind == "end":
        del data[at:]
    elif kind == "repeat":
        length = draw(st.integers(1, 40))
        data[at:at] = data[at : at + length] * draw(st.integers(1, 20))
    elif kind == "snippet":
        data[at:at] = draw(st.sampled_from(SNIPPETS))
    else:
        noise = draw(st.binary(min_size=1, max_size=16))
        data[at : at + len(noise)] = noise


@st.composite
def mutated_value(draw: st.DrawFn, value: Any) -> Any:
    """A JSON value with one to three places changed: another value, one from elsewhere, a key lost or made up."""
    whole = [copy.deepcopy(value)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(whole))
        holder, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["value", "value", "elsewhere", "lost", "new"]))
        if kind == "value":
            holder[key] = draw(values)
        elif kind == "elsewhere":
            other, name = draw(st.sampled_from(places))
            holder[key] = copy.deepcopy(other[name])
        elif kind == "lost" and holder is not whole:
            del holder[key]
        elif isinstance(holder[key], dict):
            holder[key][draw(st.text(max_size=5))] = draw(values)
        elif isinstance(holder[key], list):
            holder[key].append(draw(values))
    return whole[0]


def _places(holder: dict | list) -> Any:
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        yield holder, key
        if isinstance(holder[key], dict | list):
            yield from _places(holder[key])


def mutated_json(content: bytes) -> st.SearchStrategy[bytes]:
    """A JSON text with some values changed, or some bytes."""
    whole = mutated_value(json.loads(content)).map(lambda value: json.dumps(value).encode())
    return st.one_of(whole, whole, mutated_bytes(content))
