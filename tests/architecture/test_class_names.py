"""A class has a name of its own in the whole package: who searches for it finds one thing."""

import ast
from collections.abc import Iterable
from pathlib import Path

import attnspan

ROOT = Path(attnspan.__file__).parent


def classes(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}


def shared(files: Iterable[tuple[str, str]]) -> list[str]:
    """Names that two files have in common; (path, source) each."""
    first: dict[str, str] = {}
    return [
        f"{name}: {path} and {first[name]}"
        for path, source in files
        for name in sorted(classes(source))
        if first.setdefault(name, path) != path
    ]


def test_a_class_has_a_name_of_its_own():
    files = [(str(file.relative_to(ROOT)), file.read_text()) for file in sorted(ROOT.rglob("*.py"))]
    assert not shared(files)


def test_twin_a_name_that_two_files_have_is_found():
    assert shared([("plan/a.py", "class Run: ..."), ("paged/b.py", "def f():\n    class Run: ...")])
    assert not shared([("plan/a.py", "class Run: ..."), ("paged/b.py", "class Walk: ...")])
