"""A `[Note: ...]` is defined in one place, and whoever cites it, cites one that is there.

A note is defined where a line, or a sentence, begins with its label and goes on with its text; every other mention
cites it, perhaps with the file that it is in.
"""

import re
from collections import defaultdict
from pathlib import Path

import attnspan

ROOT = Path(attnspan.__file__).parent
REPOSITORY = ROOT.parents[1]
LABEL = re.compile(r"\[Note: ([^\]]+)\](?: in (?:[a-z]\S*/)*(\w+\.py))?")
DEFINITION = re.compile(r"(?:^(?:#\s*|\"\"\")?|\. )\[Note: ([^\]]+)\] (?!in \S+\.py)\S")


def notes(texts):
    """Where each note is defined, and the citations (label, file that is named, where) of some texts, by path."""
    defined, cited = defaultdict(list), []
    for path, text in texts.items():
        for line in text.splitlines():
            found = DEFINITION.search(line.strip())
            if found:
                defined[found[1]].append(path)
            rest = DEFINITION.sub("", line.strip())
            cited += [(match[1], match[2], path) for match in LABEL.finditer(rest)]
    return defined, cited


def faults(texts):
    """Labels that are defined twice, citations of none, and citations that name another file."""
    defined, cited = notes(texts)
    twice = [f"{label}: defined in {', '.join(paths)}" for label, paths in defined.items() if len(paths) > 1]
    none = [f"{label}: cited in {path}, defined nowhere" for label, _, path in cited if label not in defined]
    wrong = [
        f"{label}: cited in {path} as in {file}, defined in {defined[label][0]}"
        for label, file, path in cited
        if file and label in defined and Path(defined[label][0]).name != file
    ]
    return twice + none + wrong


def sources():
    found = [*ROOT.rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "benchmarks").glob("*.py")]
    found += [REPOSITORY / "ARCHITECTURE.md", *(REPOSITORY / "docs").rglob("*.md")]
    return {
        path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8")
        for path in found
        if path != Path(__file__)
    }


def test_every_note_is_defined_once_and_cited_where_it_is():
    assert faults(sources()) == []


def test_twin_faults_of_notes_are_found():
    planted = {
        "src/a.py": '"""[Note: sums] Sums are taken in order.\n\n[Note: seeds] The seed is drawn.\n"""',
        "src/b.py": "[Note: sums] Another text.\n# see [Note: seeds] in b.py, and [Note: seed].",
        "src/c.py": "See\n[Note: seeds] in a.py, and [Note: seeds].",
    }
    assert faults(planted) == [
        "sums: defined in src/a.py, src/b.py",
        "seed: cited in src/b.py, defined nowhere",
        "seeds: cited in src/b.py as in b.py, defined in src/a.py",
    ]
