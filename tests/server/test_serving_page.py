"""docs/serving.md tells the truth: its code runs, its options and metrics are those that there are."""

import re
from pathlib import Path

from typer.main import get_command

from attnspan.cli.app import app
from attnspan.server import ServerConfig
from attnspan.server.requests import IGNORED, chat_schema, completion_schema
from tests.server.servers import ask, chatting, running

TEXT = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def cells(heading):
    """What is named in the first column of the tables of a section."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_the_code_of_the_page_runs():
    [block] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {"tokenizer": chatting()}
    exec(compile(block, "serving.md", "exec"), names)
    assert not names["server"].engine.taking


def test_every_option_of_the_page_is_one_of_the_command():
    command = get_command(app).commands["serve"]
    known = {option for each in command.params for option in each.opts} | {"ATTNSPAN_API_KEY"}
    named = {name.split()[0] for name in cells("Options")}
    assert named <= known
    hidden = {"--help", "--model", "--allowed-host", "--shared-prefix-cache"}  # under Security
    assert {name for name in known if name.startswith("--")} - named - hidden == set()


def test_every_field_of_the_page_is_taken_and_every_field_is_on_the_page():
    config = ServerConfig(model="tiny")
    fields = completion_schema(config)["properties"].keys() | chat_schema(config)["properties"].keys()
    named = {name.split(".")[0] for name in cells("Endpoints") if not name.startswith(("GET", "POST"))}
    assert named <= fields
    text = set(re.findall(r"`(\w+)`", TEXT))
    assert fields - named - text - set(IGNORED) - {"model", "prompt", "messages", "modalities"} == set()


def test_every_metric_of_the_page_is_written_and_every_metric_is_on_the_page():
    with running() as server:
        text = ask(server, "GET", "/metrics")[2]
    written = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    named = set()
    for name in cells("Metrics"):
        name = name.split("{")[0]
        named.add(name if name.startswith("attnspan") else f"attnspan_requests{name}")
    assert named == written
