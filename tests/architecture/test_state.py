"""ARCHITECTURE.md lists what the library remembers between calls, and nothing else is remembered.

State is what a module, or a class as such, keeps and may change: caches, registries, locks, counters, context
variables, objects of our own classes that are not frozen, and variables that a function rebinds. A table that no
function writes to is none.
"""

import ast
import dataclasses
import functools
import importlib
import itertools
import pkgutil
import re
import threading
import types
import weakref
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from contextvars import ContextVar
from enum import Enum
from pathlib import Path

import pytest

import attnspan

pytest.importorskip("transformers")

ROOT = Path(attnspan.__file__).parent
TEXT = (Path(__file__).parents[2] / "ARCHITECTURE.md").read_text()

KEEPS = (
    functools._lru_cache_wrapper,
    ContextVar,
    itertools.count,
    threading.local,
    type(threading.Lock()),
    type(threading.RLock()),
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
)
CONTAINERS = (MutableMapping, MutableSequence, MutableSet)
WRITES = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear",
    "__setitem__", "move_to_end", "appendleft",
}  # fmt: skip


def state(source: str, module: types.ModuleType) -> list[str]:
    """The names in a module under which something is kept; `Class.name` for what a class keeps."""
    tree = ast.parse(source)
    rebound = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    written = rebound | set(_written(tree))
    found = []
    for name in dict.fromkeys(_bound(tree.body)):
        value = getattr(module, name, None)
        if name in rebound or keeps(value) or (isinstance(value, CONTAINERS) and name in written):
            found.append(name)
        if isinstance(value, type) and (value.__module__, value.__name__) == (module.__name__, name):
            inside = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
            own = {each: vars(value).get(each) for each in _bound(inside.body)}
            found += [f"{name}.{each}" for each, kept in own.items() if keeps(kept) or isinstance(kept, CONTAINERS)]
    return found


def keeps(value: object) -> bool:
    """Whether an object may keep something: one of `KEEPS`, or one of our own that is not frozen."""
    if isinstance(value, KEEPS):
        return True
    if not type(value).__module__.startswith("attnspan") or isinstance(value, type | tuple | Enum):
        return False
    if dataclasses.is_dataclass(value):
        return not value.__dataclass_params__.frozen
    return bool(getattr(value, "__dict__", True))


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements bind, in order."""
    for node in body:
        match node:
            case ast.Assign(targets=targets):
                yield from (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.If() | ast.Try() | ast.With():
                for part in ("body", "orelse", "finalbody"):
                    yield from _bound(getattr(node, part, []))


def _written(tree: ast.AST) -> Iterator[str]:
    """The names whose contents a function changes."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Lambda)]
    for node in (each for function in functions for each in ast.walk(function)):
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                yield name
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in WRITES:
                yield name
            case ast.AugAssign(target=ast.Name(id=name)):
                yield name


def modules() -> Iterator[types.ModuleType]:
    for found in pkgutil.walk_packages(attnspan.__path__, "attnspan."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def kept() -> set[str]:
    """`file: name` of everything that is kept."""
    return {
        f"{Path(module.__file__).relative_to(ROOT)}: {name}"
        for module in modules()
        for name in state(Path(module.__file__).read_text(), module)
    }


def listed(text: str) -> set[str]:
    """`file: name` of every row of the tables under "What is remembered"."""
    section = text.partition("\n## What is remembered")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| ((?:`[\w.]+`(?:, )?)+) \| .+ \| .+ \|$", section, re.M)
    return {f"{file}: {name}" for file, names in rows for name in re.findall(r"`([\w.]+)`", names)}


def test_what_is_remembered_is_listed_and_what_is_listed_is_remembered():
    found, told = kept(), listed(TEXT)
    assert not found - told, f"ARCHITECTURE.md does not tell of {sorted(found - told)}"
    assert not told - found, f"ARCHITECTURE.md tells of what is not there: {sorted(told - found)}"


def test_no_module_writes_to_a_table_of_another():
    """What `state` takes for a table because its own file does not write to it."""
    found = []
    for module in modules():
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnspan")
            for alias in node.names
        }
        local = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        found += [f"{module.__name__}: {name}" for name in set(_written(tree)) & (imported - local)]
    assert not found


def test_twin_everything_that_may_be_kept_is_found():
    source = """
import functools, itertools, threading, weakref
from contextvars import ContextVar

class Notes:
    shared: list = []
    fixed = ()
    def __init__(self): self.told = []

class Frozen(tuple): ...

TABLE = {"a": 1}
FIXED = (1, 2)
REGISTRY = {}
SEEN = []
_COUNT = 0
NOTES = Notes()
VARIABLE = ContextVar("a")
NUMBERS = itertools.count()
LOCK, OTHER = threading.Lock(), threading.RLock()
WEAK = weakref.WeakKeyDictionary()
if FIXED:
    LATE = weakref.WeakSet()

@functools.cache
def cached(): ...

def plain():
    global _COUNT
    _COUNT += 1
    REGISTRY["a"] = SEEN.append(1)
    return TABLE["a"]
"""
    module = types.ModuleType("attnspan.twin")
    exec(compile(source, "twin", "exec"), vars(module))
    assert state(source, module) == [
        "Notes.shared", "REGISTRY", "SEEN", "_COUNT", "NOTES", "VARIABLE", "NUMBERS", "LOCK", "OTHER", "WEAK", "LATE",
        "cached",
    ]  # fmt: skip


def test_twin_a_row_is_read_from_the_text():
    text = (
        "\n## What is remembered\n\n| `a/b.py` | `_X`, `C.y` | what | when |\n\n## Else\n\n| `a/c.py` | `Z` | a | b |\n"
    )
    assert listed(text) == {"a/b.py: _X", "a/b.py: C.y"}
