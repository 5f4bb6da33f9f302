"""Names with an underscore belong to the file that defines them.

Held for the parts in ``PARTS``. Sources are read, not run. A file may use a private name of `self`, which is its own or
its parent's, of other libraries, which ARCHITECTURE.md lists, and any that it defines itself.
"""

import ast
from pathlib import Path

import pytest

import attnspan

ROOT = Path(attnspan.__file__).parent
PARTS = [
    *("masks", "layouts", "plan", "tuning", "kernels", "transports", "attention", "recurrence", "parallel", "paged"),
    *("engine", "server", "integrations", "testing", "measure", "inspector", "cli"),
]
THEIRS = {  # Python's, torch's, transformers' and flash-attn-4's
    *("_asdict", "_replace", "_fields", "_field_defaults", "_exit", "_getframe", "_current_frames"),
    *("_schema", "_version", "_indices", "_values", "_FrameAction", "_FrameExecStrategy", "_compiled_call_impl"),
    *("_grad_increment_nesting", "_grad_decrement_nesting", "_wrap_for_grad", "_parameters", "_modules"),
    *("_forward_hooks", "_forward_pre_hooks", "_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_attn_implementation", "_get_num_items_in_batch"),
    *("_get_backend", "_register_backend", "_set_default_backend", "_set_group_name", "_set_group_desc", "_flatten"),
    *("_flash_attn_fwd", "_flash_attn_bwd"),
}
MAY = ("self", "cls", "super()", "torch", "dist")


def foreign(source: str) -> list[str]:
    """Private attributes that a file takes of other files' objects, and private names that it imports from this
    package, as `line: expression`."""
    nodes = list(ast.walk(ast.parse(source)))
    imported = [
        f"{node.lineno}: {each.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("attnspan")
        for each in node.names
        if each.name.startswith("_") and not each.name.startswith("__")
    ]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in attributes if ast.unparse(node) == f"self.{node.attr}"}
    return imported + [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in attributes
        if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own | THEIRS
        if ast.unparse(node.value) not in MAY and not ast.unparse(node.value).startswith(("torch.", "dist."))
    ]


@pytest.mark.parametrize("part", PARTS)
def test_no_file_reaches_into_privates_of_another(part):
    files = sorted((ROOT / part).rglob("*.py"))
    found = [f"{path.relative_to(ROOT)}:{each}" for path in files for each in foreign(path.read_text())]
    assert not found, "\n".join(found)


def test_twin_a_reach_into_privates_is_found():
    source = """from attnspan.plan import _z
class A:
    def f(self, other):
        self._x = other._y
        return other._x, self.pool._free
"""
    assert sorted(foreign(source)) == ["1: _z", "4: other._y", "5: self.pool._free"]
