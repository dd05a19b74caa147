"""The text that every CPython carries: the language manual behind `help()` and the standard library's docstrings."""

import ast
import hashlib
import importlib
import re
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import indent

from rheoscope.corpus.document import Document
from rheoscope.errors import RheoscopeError

# Modules that are pure Python on every platform, in every CPython from 3.11 on, and that no distribution packs
# apart. Their source is parsed, never imported, so nothing runs and the platform changes nothing.
MODULES = """
    __future__ _collections_abc _pydecimal _pyio _strptime _threading_local abc argparse ast asyncio.base_events
    asyncio.events asyncio.futures asyncio.locks asyncio.protocols asyncio.queues asyncio.selector_events
    asyncio.sslproto asyncio.staggered asyncio.streams asyncio.tasks asyncio.transports base64 bdb bz2 calendar cmd
    code codecs codeop collections compileall concurrent.futures._base concurrent.futures.process configparser
    contextlib copy csv ctypes dataclasses datetime dbm difflib dis email._encoded_words email._header_value_parser
    email._parseaddr email._policybase email.base64mime email.charset email.feedparser email.generator email.header
    email.headerregistry email.message email.parser email.policy email.quoprimime email.utils enum filecmp fileinput
    fractions ftplib functools getopt graphlib gzip heapq hmac http.client http.cookiejar http.cookies http.server
    imaplib importlib._bootstrap importlib._bootstrap_external importlib.abc importlib.metadata
    importlib.resources.abc importlib.util inspect ipaddress json json.decoder json.encoder locale logging
    logging.config logging.handlers lzma mailbox mimetypes multiprocessing.connection multiprocessing.managers
    multiprocessing.pool multiprocessing.shared_memory ntpath numbers operator optparse os pathlib pdb pickle
    pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats py_compile pyclbr pydoc queue random
    re rlcompleter runpy sched selectors shelve shutil site smtplib socket socketserver ssl statistics string
    subprocess symtable sysconfig tarfile tempfile textwrap threading timeit tokenize trace traceback typing
    unittest.case unittest.mock unittest.loader urllib.parse urllib.request urllib.robotparser uuid warnings wave
    weakref webbrowser wsgiref.handlers wsgiref.headers wsgiref.validate xml.dom.expatbuilder xml.dom.minidom
    xml.etree.ElementTree xml.sax._exceptions xml.sax.handler xml.sax.saxutils xml.sax.xmlreader xmlrpc.client
    xmlrpc.server zipfile zipimport
"""

HELD_OUT_EVERY = 8  # one document in eight, by the hash of its name
SHARED_PARAGRAPH = 40  # characters; shorter paragraphs ("Example:") recur in any manual and give nothing away


def manual(split: str = "held-out") -> list[Document]:
    """Documents of the built-in text, sorted by name; `split` is "held-out", "train" or "all".

    A document is held out by the hash of its name, so the split is the same on every machine. The manual repeats
    itself (the topic "compound" contains the topic "if"), so paragraphs of held-out documents are taken out of the
    training documents. Another Python version carries another text; the corpus hash tells them apart.
    """
    held_out = [document for document in _documents() if _is_held_out(document.name)]
    if split == "held-out":
        return held_out
    if split == "all":
        return list(_documents())
    if split != "train":
        raise RheoscopeError(f'the built-in text has no split "{split}"; choose "held-out", "train" or "all".')
    seen = {key for document in held_out for key in map(_paragraph_key, _paragraphs(document.text))}
    rest = [document for document in _documents() if not _is_held_out(document.name)]
    return [Document(document.name, _without(document.text, seen)) for document in rest]


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_EVERY == 0


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text)


def _paragraph_key(paragraph: str) -> str:
    return " ".join(paragraph.split())


def _without(text: str, seen: set[str]) -> str:
    kept = [
        paragraph
        for paragraph in _paragraphs(text)
        if len(key := _paragraph_key(paragraph)) < SHARED_PARAGRAPH or key not in seen
    ]
    return "\n\n".join(kept)


@cache
def _documents() -> tuple[Document, ...]:
    return tuple(sorted([*_topics(), *_modules()], key=lambda document: document.name))


def _topics() -> Iterator[Document]:
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise RheoscopeError(
            "the built-in text is the manual inside Python's pydoc_data, which this Python was packaged without; "
            "install the full standard library or name a text of your own with --text."
        ) from error
    for name, text in topics.items():
        yield Document(f"topics/{name}", text)


def _modules() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES.split():
        stem = root.joinpath(*name.split("."))
        source = next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)
        if source is not None:
            tree = ast.parse(source.read_bytes())
            yield Document(f"modules/{name}", "\n\n".join([name, *_docstrings(tree)]) + "\n")


def _docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Signatures with their docstrings, in the order of the source, indented as in the output of `help()`."""
    own = ast.get_docstring(node)
    if own:
        yield own
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            documented = "\n\n".join(_docstrings(child))
            if documented:
                yield f"{_signature(child)}\n{indent(documented, '    ')}"


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(map(ast.unparse, node.bases))
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"
