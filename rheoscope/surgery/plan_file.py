"""The YAML of plans: plain values, every key once, no references, and one sentence for whatever is wrong."""

from __future__ import annotations

import re
from typing import Any

import yaml

from rheoscope.errors import RheoscopeError

LONGEST = 4 * 2**20  # characters; a plan of ten thousand edits is shorter


class _Loader(yaml.SafeLoader):
    """Scalars, lists and mappings; no aliases, no dates, no key twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, "references are not read in a plan", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        twice = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
        if twice is not None or any(not isinstance(key, str) for key in keys):
            reason = f"the key {twice!r} stands twice" if twice is not None else "a key is no word"
            raise yaml.constructor.ConstructorError(None, None, reason, node.start_mark)
        return {key: self.construct_object(value, deep=True) for key, (_, value) in zip(keys, node.value, strict=True)}


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    return loader.construct_mapping(node)


def _refused(loader: _Loader, node: yaml.Node) -> Any:
    raise yaml.constructor.ConstructorError(None, None, f"values of kind {node.tag} are not read", node.start_mark)


_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
_Loader.yaml_constructors = {
    f"tag:yaml.org,2002:{kind}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{kind}"] for kind in _PLAIN
}
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor(None, _refused)
# "2026-11-29" is a text here, and 1e-3 a number, as everywhere but in YAML 1.1
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":merge", ":value"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Quotes texts that the loader would take for numbers, such as a hash 12e4."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def to_yaml(whole: dict[str, Any]) -> str:
    """Plain values as YAML, in the order given, lists of numbers on one line."""
    return yaml.dump(whole, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=110)


def of_yaml(text: str, *, name: str, format: str, version: int) -> dict[str, Any]:
    """The mapping that a text holds, less its format and version, which must be these or absent."""
    if len(text) > LONGEST:
        raise RheoscopeError(f"{name} has {len(text)} characters, more than any plan: give a plan")
    try:
        whole = yaml.load(text, Loader=_Loader)  # a safe loader that reads even less
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        reason = " ".join((error.problem or error.context or "not YAML").split())
        raise RheoscopeError(f"{name} cannot be read ({line}{reason}): correct it") from error
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RheoscopeError(f"{name} cannot be read (it is not YAML of plain values): correct it") from error
    if not isinstance(whole, dict):
        raise RheoscopeError(f"{name} holds no mapping: give a file of `rheoscope prescribe`")
    if whole.pop("format", format) != format:
        raise RheoscopeError(f"{name} is no plan: give a file of `rheoscope prescribe`")
    found = whole.pop("version", version)
    if found != version:
        raise RheoscopeError(f"{name} has plan version {found!r}; this rheoscope reads version {version}: update it")
    return whole
