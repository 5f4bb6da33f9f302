"""What a class of `parallel` keeps to itself is used in its own file alone.

The parts of a session share its spec (parallel/session_spec.py); nobody reaches into the underscore names of a session,
nor into those of its parts. The sources are read, not run.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import attnspan

ROOT = Path(attnspan.__file__).parent
OWNERS = "parallel"
READERS = ("parallel", "torch_compat", "integrations", "engine")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def privates(source: str) -> set[str]:
    """The underscore names of the classes of a file: methods, fields, and what is assigned to self."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ClassDef(body=body):
                for each in body:
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                        found.add(each.name)
                    elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                        found.add(each.target.id)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return {name for name in found if is_private(name)}


def reaches(source: str, owned: set[str]) -> Iterator[str]:
    """Uses of an underscore name that a class of another file owns, on anything but self and cls."""
    own = privates(source)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Attribute) or node.attr not in owned - own:
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield f"line {node.lineno}: {ast.unparse(node)}"


def sources(part: str) -> list[Path]:
    return sorted((ROOT / part).rglob("*.py"))


OWNED = {name for file in sources(OWNERS) for name in privates(file.read_text())}


@pytest.mark.parametrize("part", READERS)
def test_nobody_reaches_into_a_session_or_its_parts(part):
    found = [f"{file.relative_to(ROOT)} {use}" for file in sources(part) for use in reaches(file.read_text(), OWNED)]
    assert not found, "use what the session or its spec offers:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "use", ["session._handlers", "cp._moves", "other._moves[key]", "self.session._handlers", "f(x)._moves"]
)
def test_twin_a_reach_into_a_session_is_found(use):
    assert list(reaches(f"def part(session, cp, other):\n    return {use}\n", OWNED))


@pytest.mark.parametrize("use", ["self._moves", "session.spec", "torch._C", "session.__dict__"])
def test_twin_other_underscores_are_let_pass(use):
    assert not list(reaches(f"def part(self, session):\n    return {use}\n", OWNED))


def test_a_class_may_use_the_privates_of_its_own_kind():
    assert not list(
        reaches(
            "class A:\n    def __eq__(self, other):\n        return other._key == self._key\n    _key: int = 0",
            {"_key"},
        )
    )
