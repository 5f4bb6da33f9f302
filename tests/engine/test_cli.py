"""`attnspan generate` says what the engine says, on one rank and on two, and refuses in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnspan import Engine, SamplingParams
from attnspan.cli.app import app
from tests.engine.models import tiny, tokenizer
from tests.pace import stretched

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its tokenizer, as they are saved."""
    path = tmp_path_factory.mktemp("model")
    tiny("Llama", vocab_size=320).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def spoken(prompt, **wishes):
    engine = Engine(tiny("Llama", vocab_size=320), pages=64, tokenizer=tokenizer())
    [answer] = engine.generate([prompt], SamplingParams(**wishes))
    return answer.text


def cli(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def test_it_prints_the_text_and_nothing_else(folder, tmp_path):
    said = cli("--model", folder, "--prompt", "the cat", "--max-new-tokens", 12)
    assert said.exit_code == 0, said.output
    assert said.stdout == spoken("the cat", max_new_tokens=12) + "\n"
    assert "12 more" in said.stderr
    (tmp_path / "prompt.txt").write_text("the cat", encoding="utf-8")
    options = ["--temperature", 0.9, "--top-k", 50, "--top-p", 0.9, "--seed", 3, "--max-new-tokens", 12]
    said = cli("--model", folder, "--prompt", f"@{tmp_path / 'prompt.txt'}", *options)
    assert said.stdout == spoken("the cat", max_new_tokens=12, temperature=0.9, top_k=50, top_p=0.9, seed=3) + "\n"


def test_penalties_and_bans_are_options_too(folder):
    options = ["--repetition-penalty", 1.5, "--bad-word", "the", "--min-new-tokens", 12, "--max-new-tokens", 12]
    said = cli("--model", folder, "--prompt", "the cat", *options, "--min-p", 0.1, "--temperature", 2, "--seed", 1)
    wishes = {"repetition_penalty": 1.5, "bad_words": ["the"], "min_new_tokens": 12, "max_new_tokens": 12}
    assert said.stdout == spoken("the cat", min_p=0.1, temperature=2, seed=1, **wishes) + "\n"


@pytest.mark.slow  # three processes that import transformers
def test_two_ranks_say_the_same(folder):
    prompt = "the cat and the dog and the hat " * 12  # long enough to be computed by both together
    command = [sys.executable, "-m", "attnspan", "generate", "--model", str(folder), "--prompt", prompt]
    ours = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    said = subprocess.run(
        [*command, "--ranks", "2", "--max-new-tokens", "8"], env=ours, capture_output=True, timeout=stretched(300)
    )
    assert said.returncode == 0, said.stderr.decode()
    assert said.stdout.decode() == spoken(prompt, max_new_tokens=8) + "\n"
    [line] = said.stderr.decode().splitlines()  # neither bars nor warnings
    assert line.endswith("per second on 2 ranks")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./nowhere"], "--model must be a folder of a model, or a name that transformers finds, got './n"),
        (["--model", str(ROOT / "docs")], "transformers cannot load its model"),
        (["--prompt", ""], "prompt must hold at least one token, got none"),
        (["--prompt", "@nowhere.txt"], "--prompt @nowhere.txt: the file cannot be read"),
        (["--top-p", "3"], "top_p must be a number above 0 and at most 1, got 3.0"),
        (["--min-p", "2"], "min_p must be a number from 0 to 1, got 2.0"),
        (["--pages", "1"], "the request does not fit: "),
        (["--page-size", "0"], "--page-size must be a whole number >= 1, got 0"),
        (["--ranks", "0"], "--ranks must be a whole number >= 1, got 0"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_in_one_line(folder, options, message):
    said = cli("--model", folder, "--prompt", "the cat", *options)
    assert said.exit_code == 2
    last = said.stderr.splitlines()[-1]  # transformers may have drawn a bar before
    assert last.startswith("attnspan: ")
    assert message in last
    assert "Traceback" not in said.output


def test_weights_that_are_cut_off_are_refused_in_one_line(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 100 if file.suffix == ".safetensors" else None])
    said = cli("--model", tmp_path, "--prompt", "the cat")
    assert said.exit_code == 2
    assert "transformers cannot load its model: Error while deserializing" in said.stderr.splitlines()[-1]


def test_a_folder_without_a_tokenizer_is_told_so(tmp_path):
    tiny("Llama", vocab_size=320).save_pretrained(tmp_path)
    said = cli("--model", tmp_path, "--prompt", "the cat")
    assert said.exit_code == 2
    assert "transformers cannot load its tokenizer: " in said.stderr.splitlines()[-1]
