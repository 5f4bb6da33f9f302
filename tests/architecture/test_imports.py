"""Imports point downward, and optional packages wait until they are used.

``MAY_IMPORT`` is the table of ARCHITECTURE.md: one row for each part of the package, lowest first. The
sources are read, not run, so that an import inside a function counts as much as one at the top: what may not
be known at the top may not be known further down either.
"""

import ast
import functools
import re
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import attnspan

ROOT = Path(attnspan.__file__).parent

DATA = {"masks", "layouts", "plan"}
RUNS = DATA | {"kernels", "transports", "attention", "recurrence"}
MODELS = RUNS | {"parallel", "paged", "testing"}

ANYONE = {"errors", "assumptions", "packages", "dtypes", "splitmix", "_version"}
MAY_IMPORT = {
    "_version": set(),
    "errors": set(),
    "assumptions": set(),
    "packages": set(),
    "dtypes": set(),
    "splitmix": set(),
    "masks": set(),
    "layouts": {"masks"},
    "plan": {"masks", "layouts"},
    "tuning": DATA,  # what was measured, as data
    "kernels": {"masks"},  # one tile: not why it is computed, nor how its keys came
    "transports": set(),  # shards: not what is in them
    "attention": DATA | {"kernels", "transports", "tuning"},
    "recurrence": {"layouts", "transports"},  # states: not what attends
    "testing": {"transports"},  # the public test double
    "parallel": RUNS,
    "paged": {"masks", "layouts", "kernels", "transports", "attention"},
    "torch_compat": RUNS | {"parallel"},  # torch's names for what is here
    "engine": MODELS,  # requests and pages: models are known by a protocol
    "integrations": MODELS | {"engine"},  # other libraries' models, by that protocol too
    "server": {"engine"},  # HTTP over an engine: models are known to those who start it
    "generation": {"engine", "integrations", "transports"},  # the engine, for any model
    "measure": RUNS | {"testing", "tuning"},  # a stopwatch
    "inspector": DATA,  # reads data, never runs attention
    "attnspan": MODELS | {"engine", "generation", "inspector", "integrations"},  # __init__.py: the last when asked for
    "__main__": {"cli"},
    "cli": MODELS | {"engine", "inspector", "integrations", "attnspan", "measure", "server", "tuning"},
}

OPTIONAL = {"llguidance", "matplotlib", "numpy", "rich", "starlette", "transformers", "triton", "typer", "uvicorn"}
NEEDS_OPTIONAL = {
    "cli",
    "integrations",
    "server",
}  # nothing below imports these, so they may say what they need at the top


MODEL_LIBRARIES = {"accelerate", "peft", "safetensors", "tokenizers", "transformers"}
WITHOUT_MODEL_LIBRARIES = {"engine", "paged", "parallel", "server"}  # not even where it is used


class Import(NamedTuple):
    module: str
    line: int
    at_top: bool  # runs when the file is imported


@functools.cache
def imports(source: str, module: str) -> list[Import]:
    """Every import of ``source``, by absolute name; a package's own file is the module ``.__init__``."""

    def visit(node: ast.AST, at_top: bool) -> Iterator[Import]:
        for name in imported(node, module):
            yield Import(name, node.lineno, at_top)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        unrun = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from visit(child, at_top and not inside and child not in unrun)

    return list(visit(ast.parse(source), at_top=True))


def imported(node: ast.AST, module: str) -> list[str]:
    """The names of the modules that this one node imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=base, names=names, level=level):
            above = module.split(".")[:-level] if level else []
            base = ".".join([*above, *([base] if base else [])])
            return [f"{base}.{alias.name}" for alias in names]
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[ast.Constant(value=str(target)), *_]):
            return [target] if name in {"import_module", "__import__"} else []
    return []


def part(module: str) -> str:
    """The row that ``attnspan.x.y`` belongs to; that of the package's own file if ``x`` has none."""
    _, _, rest = module.partition(".")
    first = rest.split(".")[0]
    return first if first in MAY_IMPORT else "attnspan"


def upward(source: str, module: str) -> list[str]:
    """Imports of this package that the table does not allow."""
    here = part(module)
    allowed = MAY_IMPORT[here] | ANYONE
    return [
        f"{module}:{found.line} imports {found.module}; {here} may import {', '.join(sorted(allowed))}"
        for found in imports(source, module)
        if found.module.split(".")[0] == "attnspan" and part(found.module) not in allowed | {here}
    ]


def eager(source: str, module: str) -> list[str]:
    """Optional packages that would be imported with the file."""
    return [
        f"{module}:{found.line} imports {found.module} at the top; import it where it is used"
        for found in imports(source, module)
        if found.at_top and found.module.split(".")[0] in OPTIONAL and part(module) not in NEEDS_OPTIONAL
    ]


def model_libraries(source: str, module: str) -> list[str]:
    """Model libraries in a part that must know none, wherever they are imported."""
    return [
        f"{module}:{found.line} imports {found.module}; {part(module)} knows no model library"
        for found in imports(source, module)
        if part(module) in WITHOUT_MODEL_LIBRARIES and found.module.split(".")[0] in MODEL_LIBRARIES
    ]


def without_row(names: list[str]) -> list[str]:
    """Parts of the package that the table does not know."""
    return sorted(set(names) - set(MAY_IMPORT) - {"__init__"})


SOURCES = {".".join(["attnspan", *path.relative_to(ROOT).with_suffix("").parts]): path for path in ROOT.rglob("*.py")}


ALONE = {*ANYONE, "attnspan", "__main__"}
"""Parts that are no packages."""


def drawn(page: str) -> dict[str, set[str]]:
    """The table of ARCHITECTURE.md, as `MAY_IMPORT`: what each package imports, without what anyone may."""
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", page.partition("| package | imports |")[2], re.MULTILINE)
    found: dict[str, set[str]] = {}
    for names, cell in rows:
        like = set().union(*(found[name] for name in re.findall(r"as `(\w+)`", cell)))
        for name in re.findall(r"`(\w+)`", names):
            found.setdefault(name, like | set(re.findall(r"(?<!as )`(\w+)`", cell)))
    return found


def test_the_table_of_the_architecture_page_is_this_one():
    page = (ROOT.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    said = drawn(page.partition("| package | says |")[0])
    assert said == {name: allowed - ALONE for name, allowed in MAY_IMPORT.items() if name not in ALONE}


def in_every_source(law: Callable[[str, str], list[str]]) -> list[str]:
    """What a law has to say of the package."""
    return [each for module, path in SOURCES.items() for each in law(path.read_text(encoding="utf-8"), module)]


def test_imports_point_downward():
    assert in_every_source(upward) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attnspan.masks.band", "import attnspan.layouts"),
        ("attnspan.masks.band", "from attnspan import layouts"),
        ("attnspan.masks.band", "from attnspan import Causal"),
        ("attnspan.masks.band", "import attnspan as span"),
        ("attnspan.masks.band", "from ..plan.steps import Step"),
        ("attnspan.masks.__init__", "from .. import plan"),
        ("attnspan.masks.band", "def draw():\n    from attnspan.cli import main"),
        ("attnspan.masks.band", "class Band:\n    def draw(self):\n        import attnspan.inspector"),
        ("attnspan.masks.band", "if TYPE_CHECKING:\n    from attnspan.plan import Plan"),
        ("attnspan.masks.band", "importlib.import_module('attnspan.plan')"),
        ("attnspan.layouts.striped", "from attnspan.plan import Plan"),
        ("attnspan.kernels.flex", "from attnspan.plan import Tile"),
        ("attnspan.kernels.flex", "from attnspan.transports import Loopback"),
        ("attnspan.transports.loopback", "from attnspan.kernels import reference"),
        ("attnspan.transports.loopback", "from attnspan.plan import Plan"),
        ("attnspan.parallel.session", "from attnspan.paged import PagePool"),
        ("attnspan.paged.pool", "from attnspan.parallel import ContextParallel"),
        ("attnspan.inspector.draw", "from attnspan.attention import attend"),
        ("attnspan.engine.model_runner", "def step():\n    from attnspan.integrations.huggingface import enable"),
        ("attnspan.engine.core", "from attnspan.generation import Engine"),
        ("attnspan.__init__", "from attnspan.cli import main"),
        ("attnspan.__init__", "from .cli import main"),
        ("attnspan.errors", "from attnspan.masks import Causal"),
        ("attnspan.errors", "from . import masks"),
    ],
)
def test_twin_an_import_that_points_upward_or_sideways_is_found(module, source):
    [refusal] = upward(source, module)
    assert refusal.startswith(f"{module}:{len(source.splitlines())} imports attnspan")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attnspan.masks.causal", "from attnspan.masks.band import Band"),
        (
            "attnspan.masks.causal",
            "from .band import Band\nfrom . import band\nfrom ..errors import MaskError",
        ),
        ("attnspan.masks.__init__", "from .band import Band\nfrom . import band"),
        ("attnspan.plan.tile", "from attnspan import masks, layouts, errors"),
        ("attnspan.cli.__init__", "import attnspan\nfrom attnspan.inspector import draw"),
        ("attnspan.__init__", "from attnspan.parallel import ContextParallel"),
        ("attnspan.masks.band", "import torch, attnspanner"),
    ],
)
def test_an_import_that_points_downward_is_allowed(module, source):
    assert upward(source, module) == []


def test_optional_packages_are_imported_where_they_are_used():
    assert in_every_source(eager) == []


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from matplotlib.axes import Axes",
        "try:\n    import triton\nexcept ImportError: ...",
        "class Kernel:\n    import triton.language as tl",
        "if TYPE_CHECKING: ...\nelse:\n    import rich",
        "np = __import__('numpy')",
    ],
)
def test_twin_an_optional_package_at_the_top_is_found(source):
    assert len(eager(source, "attnspan.kernels.flex")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("attnspan.kernels.flex", "def compile():\n    import triton"),
        ("attnspan.inspector.draw", "if TYPE_CHECKING:\n    from matplotlib.axes import Axes"),
        ("attnspan.cli.__init__", "import typer"),
        ("attnspan.integrations.hf", "import transformers"),
    ],
)
def test_an_optional_package_further_down_or_at_the_top_of_its_user_is_allowed(module, source):
    assert eager(source, module) == []


def test_the_engine_knows_no_model_library():
    assert in_every_source(model_libraries) == []


@pytest.mark.parametrize(
    "source",
    [
        "from transformers import PreTrainedModel",
        "def layers(model):\n    from transformers import AttentionInterface",
        "if TYPE_CHECKING:\n    import transformers.models",
        "importlib.import_module('peft')",
    ],
)
def test_twin_a_model_library_in_the_engine_is_found_wherever_it_is_imported(source):
    assert len(model_libraries(source, "attnspan.engine.model_runner")) == 1
    assert model_libraries(source, "attnspan.integrations.huggingface.paged_attention") == []


def test_every_part_of_the_package_has_its_row():
    assert without_row([module.split(".")[1] for module in SOURCES]) == []


def test_twin_a_part_without_a_row_is_found():
    assert without_row(["masks", "utils", "__init__"]) == ["utils"]


def test_the_table_has_no_circle():
    TopologicalSorter(MAY_IMPORT).prepare()


def test_twin_a_circle_in_the_table_is_found():
    with pytest.raises(CycleError):
        TopologicalSorter(MAY_IMPORT | {"masks": {"plan"}}).prepare()
