"""Code on pages is run: every page with Python blocks has a test that runs all of them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN_BY = {
    "README.md": "tests/docs/test_readme.py",
    **{
        f"docs/api/{page}.md": "tests/docs/test_api_pages.py"
        for page in ("generation", "huggingface", "layouts", "recurrence", "sessions", "testing")
    },
    "docs/attention.md": "tests/docs/test_attention_page.py",
    "docs/bench.md": "tests/docs/test_short_blocks.py",
    "docs/documents.md": "tests/docs/test_documents_page.py",
    "docs/engine.md": "tests/engine/test_engine_page.py",
    "docs/extending.md": "tests/docs/test_extending_page.py",
    "docs/huggingface.md": "tests/integrations/test_huggingface_page.py",
    "docs/models.md": "tests/docs/test_short_blocks.py",
    "docs/paged.md": "tests/paged/test_page.py",
    "docs/quickstart.md": "tests/docs/test_quickstart_page.py",
    "docs/recurrence.md": "tests/docs/test_recurrence_page.py",
    "docs/serving.md": "tests/server/test_serving_page.py",
    "docs/testing.md": "tests/docs/test_testing_page.py",
    "docs/torch_compat.md": "tests/docs/test_short_blocks.py",
    "docs/training.md": "tests/parallel/test_training_page.py",
}


def with_code(root):
    """The pages that have Python blocks."""
    pages = [*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("examples/*.md")]
    return {page.relative_to(root).as_posix() for page in pages if "```python" in page.read_text(encoding="utf-8")}


def test_every_page_with_code_has_a_test_that_reads_it():
    assert with_code(ROOT) == set(RUN_BY)
    for page, test in RUN_BY.items():
        assert re.search(rf"\b{re.escape(Path(page).name)}\b", (ROOT / test).read_text(encoding="utf-8")), test


def test_twin_a_page_without_a_test_is_found(tmp_path, monkeypatch):
    (tmp_path / "docs" / "api").mkdir(parents=True)
    for page in (*RUN_BY, "docs/new.md"):
        (tmp_path / page).write_text("```python\nx = 1\n```\n")
    assert with_code(tmp_path) - set(RUN_BY) == {"docs/new.md"}
    monkeypatch.setitem(RUN_BY, "docs/models.md", "tests/docs/test_changelog.py")
    with pytest.raises(AssertionError, match="test_changelog"):
        test_every_page_with_code_has_a_test_that_reads_it()
