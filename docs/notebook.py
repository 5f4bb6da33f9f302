"""Run notebooks and keep what they show: `python docs/notebook.py docs/notebooks/*.ipynb`.

Cells run in order, in one namespace, without Jupyter. What a cell prints, the value of its last line and the figures
that it leaves open become its outputs. A test runs the notebooks again and compares the text.
"""

import ast
import base64
import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Output = dict[str, Any]


def run(path: Path) -> Iterator[tuple[Output, list[Output]]]:
    """Every cell of code, and its outputs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.close("all")
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            yield cell, list(_outputs("".join(cell["source"]), names))


def executed(path: Path) -> str:
    """The notebook with the outputs of a run."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, (_, outputs)) in enumerate(zip(code, run(path), strict=True), start=1):
        for each in outputs:
            if each["output_type"] == "execute_result":
                each["execution_count"] = number
        cell["execution_count"], cell["outputs"] = number, outputs
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def as_page(path: Path) -> str:
    """The notebook as Markdown, for the site."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f'<img alt="" src="data:image/png;base64,{data["image/png"].strip()}">')
            else:
                parts.append(f"```text\n{text_of(output)}```")
    return "\n\n".join(parts) + "\n"


def text_of(output: Output) -> str:
    """What an output says; nothing for a picture alone."""
    said = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
    return said if said.endswith("\n") else f"{said}\n"


def _outputs(source: str, names: dict[str, Any]) -> Iterator[Output]:
    from matplotlib import pyplot

    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "a cell", "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), "a cell", "eval"), names)
    if printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        yield {"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}
    for number in pyplot.get_fignums():
        stored = io.BytesIO()
        pyplot.figure(number).savefig(stored, format="png", dpi=80, metadata={"Software": None})
        image = base64.b64encode(stored.getvalue()).decode()
        yield {"data": {"image/png": image}, "metadata": {}, "output_type": "display_data"}
    pyplot.close("all")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(executed(Path(name)), encoding="utf-8")
