"""The census: what it says of a family is what `enable` and an engine say of its model."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from attnspan.cli.app import app
from attnspan.integrations.huggingface import census
from attnspan.integrations.huggingface.census import families, family
from benchmarks import models as benchmark

pytestmark = pytest.mark.usefixtures("quietly")

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
FEW = {"causal": ["llama", "gemma3_text", "bert", "mamba2", "gpt_neo", "reformer", "jetmoe"]}
FEW |= {"image-text": ["udop", "glm4v", "molmo2", "gemma4_unified"]}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FEW.items() for name in names])
def test_the_page_says_what_the_census_finds(kind, name):
    found = family(kind, name)
    numbered = dict(re.findall(r"^(\d+)\. (.*)", PAGE.read_text().replace("\n   ", " "), re.MULTILINE))
    row = re.search(rf"^\| {name} \| {found.model} \| (.*) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    for said, reason in zip(row.groups(), (found.training, found.generation), strict=True):
        number = re.fullmatch(r"yes|no \[(\d+)\]", said).group(1)
        assert (None if number is None else numbered[number]) == (None if reason is None else benchmark.general(reason))


def test_every_family_is_on_the_page():
    names = re.findall(r"^\| ([\w.-]+) \| \w+ \| (?:yes|no)", PAGE.read_text(), re.MULTILINE)
    if transformers.__version__ not in PAGE.read_text():
        pytest.skip("the page is of another version of transformers")
    assert names == [*families("causal"), *families("image-text")]


def test_a_check_that_breaks_off_is_told_from_a_refusal(monkeypatch):
    monkeypatch.setattr(census, "TransformersModel", lambda model: 1 / 0)
    assert family("causal", "llama").generation == "check failed: ZeroDivisionError: division by zero"


def test_a_family_that_transformers_cannot_build_is_told_from_a_refusal(monkeypatch):
    monkeypatch.setattr(census, "LACKING", {})
    assert family("causal", "nemotron").training.startswith("not built: TypeError: unsupported operand")


def test_questions_about_numbers_have_the_ordinary_answer():
    ones = torch.ones(2, device="meta")
    with census._Ordinary():
        assert (ones == 1).all()
        assert not (ones == 0).any()
        with pytest.raises(RuntimeError, match="meta"):
            ones.max().item()


def run(*arguments):
    done = CliRunner().invoke(app, ["models", *arguments])
    return done.exit_code, done.output


def test_the_command_prints_a_line_for_each_family():
    code, said = run("mistral", "reform*", "--kind", "causal")
    assert code == 0
    assert said.splitlines()[0].split() == ["causal", "training", "generation"]
    assert re.search(r"^reformer +no +no +reformer", said, re.MULTILINE)
    assert re.search(r"^mistral +yes +yes$", said, re.MULTILINE)
    assert "served in training" in said.splitlines()[-1]
    assert max(map(len, said.splitlines())) <= 100


def test_reasons_are_cut_to_a_line_unless_families_are_named(monkeypatch):
    monkeypatch.setattr(census, "families", lambda kind: ["reformer", "bart"])
    _, said = run("--kind", "causal")
    assert [line.split()[0] for line in said.splitlines()[1:-1]][:2] == ["reformer", "bart"]
    assert re.search(r"^reformer .*\.\.\.$", said, re.MULTILINE)
    assert max(map(len, said.splitlines())) <= 100


def test_the_command_prints_json():
    code, said = run("mistral", "--kind", "causal", "--json")
    assert code == 0
    assert json.loads(said) == [
        {"name": "mistral", "kind": "causal", "model": "MistralForCausalLM", "training": None, "generation": None}
    ]


def test_a_name_may_be_written_as_on_a_model_card():
    code, said = run("GPT-2", "GPT-NeoX", "--kind", "causal")
    assert code == 2  # the model type is gpt2
    assert "is called GPT-2;" in said
    code, said = run("GPT-NeoX", "--kind", "causal")
    assert (code, said.splitlines()[1].split()[0]) == (0, "gpt_neox")


def test_what_is_not_there_is_refused_by_name():
    assert run("gpt-99") == (
        2,
        f"attnspan: no causal or image-text family of transformers {transformers.__version__} is called gpt-99; "
        "others are not checked\n",
    )
    assert "is called zz or gpt-99; others" in run("mistral", "zz", "gpt-99")[1]
    assert run("qwen")[1].endswith('is called qwen; did you mean "qwen*"?\n')
    assert run("mistrall")[1].endswith("is called mistrall; did you mean 'mistral'?\n")
    assert run("--kind", "speech")[1] == ("attnspan: kind must be one of causal, image-text, all, got 'speech'\n")


@pytest.mark.parametrize(("name", "wanted"), [("llava", 2023), ("qwen3_vl", 2025), ("glmga", 2026), ("gemma4", 2026)])
def test_the_year_of_a_family_is_that_of_its_files(name, wanted):
    assert benchmark.year(name) == wanted
