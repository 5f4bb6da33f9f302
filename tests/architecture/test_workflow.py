"""What CI and pre-commit run is what the project says it supports, and what `make check` runs.

Versions stand in three places that cannot read each other: the workflow, pyproject.toml and constraints.txt.
"""

import os
import re
import subprocess
import tomllib
from copy import deepcopy
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()


def disagreements(workflow, project, constraints):
    """What the workflow tests otherwise than the project supports it."""
    supported = re.findall(r"Programming Language :: Python :: (3\.\d+)$", "\n".join(project["classifiers"]), re.M)
    (least,) = (name.removeprefix("torch>=") for name in project["dependencies"] if name.startswith("torch"))
    pinned = re.search(r"^torch==(\d+\.\d+)", constraints, re.M)[1]
    matrices = {name: job["strategy"]["matrix"] for name, job in workflow["jobs"].items()}
    wrong = [
        f"{name}: Python {matrix['python']}, the classifiers say {supported}"
        for name, matrix in matrices.items()
        if matrix["python"] != supported
    ]
    if project["requires-python"] != f">={supported[0]}":
        wrong.append(f"requires-python {project['requires-python']}, the classifiers say {supported}")
    if matrices["test"]["torch"] != [least, pinned, "newest"]:
        wrong.append(f"torch {matrices['test']['torch']}, the project needs {least} and pins {pinned}")
    return wrong


def test_the_workflow_tests_every_supported_python_and_torch():
    assert disagreements(WORKFLOW, PROJECT, CONSTRAINTS) == []


def test_twin_a_version_that_only_one_of_them_names_is_found():
    another = deepcopy(WORKFLOW)
    another["jobs"]["test"]["strategy"]["matrix"]["torch"][0] = "2.12"
    assert disagreements(another, PROJECT, CONSTRAINTS) == [
        "torch ['2.12', '2.13', 'newest'], the project needs 2.11 and pins 2.13"
    ]
    another = deepcopy(WORKFLOW)
    another["jobs"]["check"]["strategy"]["matrix"]["python"].pop()
    assert len(disagreements(another, PROJECT, CONSTRAINTS)) == 1
    assert len(disagreements(WORKFLOW, PROJECT | {"requires-python": ">=3.10"}, CONSTRAINTS)) == 1


def test_each_job_runs_its_target_of_make_with_wheels_for_the_cpu():
    assert WORKFLOW["env"]["PIP_EXTRA_INDEX_URL"].endswith("/cpu")
    for name, job in WORKFLOW["jobs"].items():
        assert job["steps"][-1]["run"].startswith(f"make {name}")


@pytest.mark.parametrize("torch", WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["torch"])
def test_the_constraints_of_a_job_pin_everything_and_its_own_torch(torch, tmp_path):
    (step,) = (step for step in WORKFLOW["jobs"]["test"]["steps"] if step.get("name", "").startswith("constraints"))
    env = {"PATH": os.environ["PATH"], "RUNNER_TEMP": str(tmp_path), "TORCH": torch}
    subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env=env, check=True)
    others = [line for line in CONSTRAINTS.splitlines() if not line.startswith("torch==")]
    own = [] if torch == "newest" else [f"torch=={torch}.*"]
    assert (tmp_path / "constraints.txt").read_text().splitlines() == others + own


def test_pre_commit_runs_what_make_check_runs():
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[1]
    checks = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" --check") for line in recipe.splitlines()]
    for check, hook in zip(checks, HOOKS, strict=True):
        assert hook["entry"].startswith(check)
