"""What is published installs elsewhere and works: the wheel, and a wheel that is built from the sdist."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from attnspan import __version__

ROOT = Path(__file__).parents[1]
SMOKE = """
import attnspan as span, torch
from importlib.metadata import distributions
from importlib.resources import files
assert "site-packages" in span.__file__, span.__file__
assert files("attnspan").joinpath("py.typed").is_file() and files("attnspan.inspector").joinpath("page.html").is_file()
mask, x = span.Causal() & span.Documents([5, 11]), torch.randn(3, 1, 2, 16, 4)
def rank(world):
    cp = span.ContextParallel(world, seq_len=16, mask=mask)
    return cp.unshard(cp.attention(*cp.shard(list(x), dim=2)), dim=2)
one, two = (span.testing.loopback(ranks).run(rank)[0] for ranks in (1, 2))
torch.testing.assert_close(one, two)
[found] = distributions(name="attnspan", path=[span.__file__.rpartition("/attnspan/")[0]])  # not that of a clone
print(found.version)
"""


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(source, target, kind):
    """The distribution of a source tree."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", target, cwd=source)
    [found] = Path(target).glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


def used(wheel, folder):
    """What the smoke test says in an environment that has the wheel, and of everything else what is installed here."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    [packages] = Path(folder).glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)  # as installers do with a pure wheel
    theirs = next(path for path in sys.path if path.endswith("site-packages"))  # .pth files in it are not read
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return run(Path(folder) / "bin/python", "-c", SMOKE, cwd=folder, env=environment | {"PYTHONPATH": theirs})


def test_the_wheel_works_in_an_environment_of_its_own(tmp_path):
    wheel = built(ROOT, tmp_path / "dist", "wheel")
    assert used(wheel, tmp_path / "env") == f"{__version__}\n"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"attnspan", f"attnspan-{__version__}.dist-info"}


@pytest.mark.slow
def test_a_wheel_can_be_built_from_the_sdist(tmp_path):
    sdist = built(ROOT, tmp_path / "dist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / f"attnspan-{__version__}"
    for name in ("README.md", "CHANGELOG.md", "LICENSE", "Makefile", "constraints.txt", "tests", "docs", "examples"):
        assert (source / name).exists(), name
    assert used(built(source, tmp_path / "again", "wheel"), tmp_path / "env") == f"{__version__}\n"


def test_the_version_is_the_same_wherever_it_stands():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{__version__}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["version"]["path"].endswith(
        "_version.py"
    )
