"""Everything a function can read, as a value that is compared: a cheap proof that it computes what it did.

To trace a function takes milliseconds, as long as a small attention. The function object tells nothing: people make a
new one in every layer, and one object may read something else the next time. What a plain function reads is its code,
its cells, defaults and globals. If these are numbers, tensors, other plain functions, or attributes of plain objects
that are any of these, then a fingerprint holds them all; if there is anything else among them, there is no fingerprint,
and the function must be traced to know what it computes.

>>> slope = 0.5
>>> def score_mod(score, b, h, q_idx, kv_idx):
...     return score - slope * (q_idx - kv_idx)
>>> before = fingerprint(score_mod)
>>> slope = 0.25
>>> fingerprint(score_mod) == before
False

[Note: tensors] A tensor is identified by its id and its metadata, not by its content: a traced program takes it as an
input. Code that keeps a fingerprint checks separately whether anything was computed from the content
(`Program.reads_values`, snapshot.py).

[Note: attributes] Of an object, only attributes whose names appear in the code can be read, in the object or in its
class. Whatever reads others, or reads in ways of its own (`getattr`, `vars`, `__getattr__`, slots, descriptors), has no
fingerprint.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
from collections.abc import Iterable
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device)
LIBRARIES = (torch, F, math)
"""Modules whose functions mean what they mean."""

BUILTINS = {
    *("abs", "all", "any", "bool", "callable", "complex", "dict", "divmod", "enumerate", "filter", "float"),
    *("frozenset", "int", "isinstance", "len", "list", "map", "max", "min", "pow", "range", "reversed", "round"),
    *("set", "slice", "sorted", "sum", "tuple", "zip", "NotImplemented"),
    *("ValueError", "TypeError", "AssertionError", "NotImplementedError"),
}
"""Names of Python's own that compute from their arguments alone."""

DEEPEST = 32
"""How far values are followed into one another."""

MAX_VALUES = 4096
"""How many values are looked at: to trace a function that reads more is no slower."""


class NoFingerprint(Exception):
    """There is no fingerprint."""


class CodeNames(NamedTuple):
    """What code names, with the functions that are written inside it."""

    globals: frozenset[str]
    attributes: frozenset[str]
    plain: bool  # imports nothing by itself


def fingerprint(fn: object) -> tuple[object, ...] | None:
    """Equal while a function computes the same from the tensors it reads; None if there is no telling.

    Tensors, code and classes are told apart by their id: keep the function for as long as its fingerprint.
    """
    reading = _FunctionReading()
    try:
        found = reading.part(fn)
        while reading.grown:  # attributes that code met later reads of objects met before
            reading.grown = False
            found = reading.part(fn)
    except NoFingerprint:
        return None
    return torch.get_default_dtype(), found


class _FunctionReading:
    """One walk over what a function can read."""

    def __init__(self) -> None:
        self.attributes: frozenset[str] = frozenset()
        self.grown = False
        self.inside: list[int] = []  # what is being followed: a function may call itself
        self.count = 0

    def part(self, value: object) -> tuple[object, ...]:
        """A value as what is compared."""
        kind = type(value)
        self.count += 1
        if self.count > MAX_VALUES:
            raise NoFingerprint
        if kind in NUMBERS:
            return kind, repr(value)
        if kind in (Tensor, torch.nn.Parameter) and isinstance(value, Tensor):
            return _tensor(value)
        if any(value is each for each in LIBRARIES) or _is_library_type(value):
            return "library", id(value)
        if id(value) in self.inside:
            return "itself", len(self.inside) - self.inside.index(id(value))
        if len(self.inside) > DEEPEST:
            raise NoFingerprint
        self.inside.append(id(value))
        try:
            return self._deep(value)
        finally:
            self.inside.pop()

    def _deep(self, value: object) -> tuple[object, ...]:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, BuiltinFunctionType):
            return _builtin(value)
        if isinstance(value, MethodType):
            return "method", *self._parts((value.__func__, value.__self__))
        if type(value) is functools.partial:
            return "partial", *self._parts((value.func, value.args, value.keywords))
        if type(value) is tuple or type(value) is list or type(value) is torch.Size:
            return type(value), *self._parts(value)
        if type(value) is dict:
            return dict, *self._parts(value.keys()), *self._parts(value.values())
        if type(value) is type:
            return self._class(value)
        return self._object(value)

    def _parts(self, values: Iterable[object]) -> list[tuple[object, ...]]:
        return [self.part(each) for each in values]

    def _function(self, fn: FunctionType) -> tuple[object, ...]:
        try:
            cells = [cell.cell_contents for cell in fn.__closure__ or ()]
        except ValueError as empty:  # one that is not filled yet
            raise NoFingerprint from empty
        read = [*cells, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values(), *fn.__dict__.values()]
        if not _is_torchs(fn):
            read += self._named(fn)
        return "function", fn.__code__, *self._parts(read)

    def _named(self, fn: FunctionType) -> list[object]:
        """The globals that a function names."""
        names, known = _names(fn.__code__), fn.__globals__
        missing = names.globals - known.keys()
        if not names.plain or not missing <= BUILTINS or "__builtins__" in names.globals:
            raise NoFingerprint
        if not names.attributes <= self.attributes:
            self.attributes, self.grown = self.attributes | names.attributes, True
        return [known[name] for name in sorted(names.globals - missing)]

    def _class(self, kind: type, called: bool = True) -> tuple[object, ...]:
        """See [Note: attributes]."""
        found: list[object] = []
        for each in kind.__mro__[:-1]:
            if type(each) is not type or _is_builtin(each) or "__slots__" in each.__dict__:
                raise NoFingerprint
            for name, value in sorted(each.__dict__.items()):
                special = name.startswith("__") and name not in (INERT if called else {*INERT, *BIRTH})
                if special or name in self.attributes:
                    found += [name, self.part(value)]
        return "class", id(kind), *found

    def _object(self, value: object) -> tuple[object, ...]:
        """See [Note: attributes]."""
        kind = type(value)
        if isinstance(value, torch.nn.Module) or not hasattr(value, "__dict__") or self.attributes & {*UNSEEN}:
            raise NoFingerprint
        told = (kind,) if kind is SimpleNamespace else self._class(kind, called=False)
        held = vars(value)
        return told, *((name, self.part(held[name])) for name in sorted(self.attributes & held.keys()))


INERT = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__firstlineno__"),
    *("__static_attributes__", "__repr__", "__match_args__", "__annotate__", "__annotate_func__", "__replace__"),
    *("__annotations_cache__", "__dataclass_fields__", "__dataclass_params__"),
}
"""Names in classes that nothing asks for but by name."""

BIRTH = ("__init__", "__new__", "__post_init__")
"""Names in classes that are asked for when an object is made."""

UNSEEN = ("__dict__", "__class__")
"""Attributes by which others are reached that the code does not name."""


def _is_builtin(kind: type) -> bool:
    """Whether a type is not written in Python, so that its objects may hold more than attributes."""
    return not kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _is_library_type(value: object) -> bool:
    """Whether it is one of torch's types, or one of Python's own."""
    if not isinstance(value, type):
        return False
    own = value.__name__ in BUILTINS and getattr(builtins, value.__name__) is value
    return own or value.__module__.partition(".")[0] == "torch"


def _is_torchs(fn: FunctionType) -> bool:
    """Whether a function is part of torch, and reads nothing but its arguments and cells."""
    return str(fn.__globals__.get("__name__")).partition(".")[0] == "torch"


def _tensor(value: Tensor) -> tuple[object, ...]:
    """See [Note: tensors]."""
    if value.__dict__:
        raise NoFingerprint
    layout = (value.stride(), value.requires_grad) if value.layout == torch.strided else (value.layout,)
    return "tensor", id(value), tuple(value.shape), value.dtype, value.device, *layout


def _builtin(value: BuiltinFunctionType) -> tuple[object, ...]:
    """A function that is not written in Python: of a library, not of an object or a clock."""
    owner = value.__self__
    if owner is math or (owner is builtins and value.__name__ in BUILTINS):
        return "builtin", id(value)
    if getattr(torch, value.__name__, None) is value and not _asks_torch(value.__name__):
        return "builtin", id(value)
    raise NoFingerprint


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> CodeNames:
    """What code names. It is not plain if it imports, asks torch for a state, or changes what others see."""
    found: set[str] = set()
    attributes: set[str] = set()
    plain = True
    for each in dis.get_instructions(code):
        name, argument = each.opname, each.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            found.add(argument)
        elif name in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            if (code.co_name, argument) != ("__eq__", "__class__"):  # which is only compared there, as by dataclasses
                attributes.add(argument)
            plain = plain and not _asks_torch(argument)
        elif name.startswith("IMPORT") or name in CHANGES or (name == "STORE_DEREF" and argument in code.co_freevars):
            plain = False
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return CodeNames(
        frozenset(found).union(*(each.globals for each in inner)),
        frozenset(attributes).union(*(each.attributes for each in inner)),
        plain and all(each.plain for each in inner),
    )


CHANGES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR", "STORE_NAME")
"""Instructions that change what others see."""


STATES = ("get_", "set_", "is_grad", "is_inference", "is_autocast", "is_deterministic", "are_", "initial_")
"""How functions of torch begin that tell of a state, or change it."""

PURE = (torch.nn, torch.special, torch.linalg, torch.functional, torch.ops)


@functools.cache
def _asks_torch(name: str) -> bool:
    """Whether an attribute, if it is one of torch, tells of a state of its own, or is a module that may."""
    value = getattr(torch, name, None)
    return name.startswith(STATES) or (isinstance(value, ModuleType) and value not in PURE)
