"""No file tells of the machine it was written on."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|home|work)/")


def telling(files):
    """``path:line`` of each machine path in files that hold text."""
    return [
        f"{path}:{number}"
        for path, text in files
        for number, line in enumerate(text.splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]


def committed():
    """Path and text of each file that is, or would be, committed."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    for name in sorted(filter(None, names.split("\0"))):
        path = REPOSITORY / name
        if path.is_file():  # a file deleted but not yet committed so is still listed
            # An image has no lines to read; its bytes are replaced, never matched by accident of decoding.
            yield name, path.read_text(encoding="utf-8", errors="replace")


@pytest.mark.skipif(
    not (REPOSITORY / ".git").exists() or not shutil.which("git"),
    reason="only a checkout knows what is committed",
)
def test_no_committed_file_names_a_machine_path():
    files = list(committed())
    assert "pyproject.toml" in dict(files)
    assert telling(files) == []


@pytest.mark.parametrize("place", ["root", "home", "work"])
def test_twin_a_machine_path_is_found(place):
    text = f"fine\nread from /{place}/someone/file\n"
    assert telling([("notes.md", text)]) == ["notes.md:2"]


@pytest.mark.parametrize("text", ["https://example.org/home/page", "./work/here", "~/work", "and/or/work/it"])
def test_an_address_or_a_relative_path_is_no_machine_path(text):
    assert telling([("notes.md", text)]) == []
