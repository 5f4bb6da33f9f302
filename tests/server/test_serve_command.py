"""`attnspan serve` listens where it says, ends on a signal, over ranks too, and refuses in one line."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from attnspan import Engine, SamplingParams
from attnspan.cli.app import app
from tests.engine.test_adapters_by_name import adapted
from tests.pace import patiently
from tests.server.servers import ask, chatting, connected, expected, llama, post, until

ROOT = Path(__file__).parents[2]
TORCHRUN = str(Path(sysconfig.get_path("scripts")) / "torchrun")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its tokenizer, as they are saved."""
    path = tmp_path_factory.mktemp("models") / "small"
    llama().save_pretrained(path)
    chatting().save_pretrained(path)
    return path


@contextlib.contextmanager
def started(folder, *options, launcher=(sys.executable,), **environment):
    """The command, from its beginning."""
    command = [*launcher, "-m", "attnspan", "serve", "--model", str(folder), "--port", "0", "--pages", "64"]
    ours = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")} | environment
    piped = {"stderr": subprocess.PIPE, "text": True, "env": ours, "start_new_session": True}
    with subprocess.Popen([*command, *options], **piped) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def listening(process):
    """The server of a command, once it listens."""
    said = ""
    while not (found := re.search(r"listening on (http://\S+), as (\S+)", said)):
        line = process.stderr.readline()
        assert line, said
        said += line
    return SimpleNamespace(address=found[1], model=found[2], process=process, said=said)


def ended(process):
    """The status and the last words of a command that is to end."""
    assert patiently(lambda seconds: process.wait(seconds) is not None, 60)
    return process.returncode, process.stderr.read()


@contextlib.contextmanager
def serving(folder, *options, ends=signal.SIGTERM, **environment):
    """The command, once it listens; it must end well at a signal."""
    with started(folder, *options, **environment) as process:
        server = listening(process)
        yield server
        ranks = children(process.pid)
        process.send_signal(ends)
        status, rest = ended(process)
        assert not any(map(lives, ranks))
    assert status == 0, rest
    assert "Traceback" not in server.said + rest


@contextlib.contextmanager
def streaming(server):
    """An answer that goes on for long, once it has begun: a function that reads its events to their end."""
    body = {"model": server.model, "prompt": "the cat", "max_tokens": 500, "stream": True}
    with contextlib.closing(connected(server)) as wire:
        wire.sendall(post("/v1/completions", body))
        said = wire.recv(65536)
        assert said.startswith(b"HTTP/1.1 200")

        def rest():
            parts = [said]
            while parts[-1]:
                parts.append(wire.recv(65536))
            events = re.findall(rb"data: (.*)\n\n", b"".join(parts))
            assert events[-1] == b"[DONE]"
            return [json.loads(event) for event in events[:-1]]

        yield rest


def answered(server, key=None):
    body = {"model": server.model, "prompt": "the cat", "max_tokens": 9}
    status, _, said = ask(server, "POST", "/v1/completions", body, {"Authorization": f"Bearer {key}"} if key else None)
    return said["choices"][0]["text"] if status == 200 else status


@pytest.mark.slow  # a process that imports transformers
def test_the_command_serves_a_folder_and_ends_at_a_signal(folder):
    with serving(folder, ATTNSPAN_API_KEY="first second") as server:
        assert server.model == "small"
        said = expected("the cat", max_new_tokens=9).text
        assert [answered(server, key) for key in ("first", "second", "third", None)] == [said, said, 401, 401]


@pytest.mark.slow  # three processes that import transformers
def test_over_two_ranks_the_answers_are_those_of_one(folder):
    with serving(folder, "--ranks", "2", "--served-model-name", "both") as server:
        assert server.model == "both"
        assert answered(server) == expected("the cat", max_new_tokens=9).text
        prompt = "the cat and the dog and the hat sat there on that mat " * 8  # computed by both together
        body = {"model": "both", "prompt": prompt, "max_tokens": 9, "temperature": 1, "seed": 3}
        [choice] = ask(server, "POST", "/v1/completions", body)[2]["choices"]
        assert choice["text"] == expected(prompt, max_new_tokens=9, temperature=1.0, seed=3).text


RANKS = {"ranks": (("--ranks", "2"), {}), "torchrun": ((), {"launcher": (TORCHRUN, "--nproc-per-node=2")})}


@pytest.mark.slow  # three processes that import transformers
@pytest.mark.parametrize("how", RANKS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_ranks_and_streams_properly(folder, how, number):
    options, launcher = RANKS[how]
    with started(folder, "--drain", "0.2", *options, **launcher) as process:
        server = listening(process)
        ranks = children(process.pid)
        with streaming(server) as rest:
            process.send_signal(number)
            assert rest()[-1]["error"]["code"] == "unavailable"
        status, _ = ended(process)
        assert status == (how == "torchrun")  # which ends with an error of its own
        assert not any(map(lives, ranks))


@pytest.mark.slow  # three processes
@pytest.mark.parametrize("how", RANKS)
def test_a_rank_that_is_lost_ends_the_server(folder, how):
    options, launcher = RANKS[how]
    with started(folder, *options, **launcher) as process:
        server = listening(process)
        ranks = children(process.pid)
        assert len(ranks) == 2
        with streaming(server) as rest:
            os.kill(ranks[-1], signal.SIGKILL)
            assert "error" in rest()[-1]
        status, said = ended(process)
        assert status not in (0, None)
        assert "rank" in said
        assert not any(map(lives, ranks))


@pytest.mark.slow  # processes that import transformers
def test_a_second_signal_does_not_await_the_open_requests(folder):
    with started(folder, "--ranks", "2", "--drain", "1000") as process:
        server = listening(process)
        with streaming(server) as rest:
            for _ in range(2):
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)
            assert rest()[-1]["error"]["code"] == "unavailable"
        assert ended(process)[0] == 0


@pytest.mark.slow  # processes that import torch
def test_a_signal_while_ranks_load_ends_them(folder):
    with started(folder, "--ranks", "2") as process:
        until(lambda: len(children(process.pid)) == 2)
        ranks = children(process.pid)
        process.send_signal(signal.SIGINT)
        status, said = ended(process)
        assert status == 128 + signal.SIGINT, said
        assert "Traceback" not in said
        assert not any(map(lives, ranks))


@pytest.fixture(scope="module")
def adapter_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("adapters")
    adapted("Llama", {"r": 4}, vocab_size=320).save_pretrained(path)  # in a folder of its name
    return path / "a"


@pytest.mark.slow  # a process that imports transformers and peft
def test_adapters_are_served_beside_the_model(folder, adapter_folder):
    own = adapted("Llama", {"r": 4}, vocab_size=320)
    [answer] = Engine(own, pages=64, tokenizer=chatting()).generate(["the cat"], SamplingParams(max_new_tokens=9))
    with serving(folder, "--adapter", f"formal={adapter_folder}", "--prompt-lookup-num-tokens", "4") as server:
        assert server.model == "small,"
        said = []
        for name in ("small", "formal"):
            body = {"model": name, "prompt": "the cat", "max_tokens": 9}
            said.append(ask(server, "POST", "/v1/completions", body)[2]["choices"][0]["text"])
        assert said == [expected("the cat", max_new_tokens=9).text, answer.text]
        assert said[0] != said[1]


def test_an_adapter_of_another_model_is_refused_in_one_line(folder, adapter_folder, tmp_path):
    for file in adapter_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "adapter_config.json").read_text()
    (tmp_path / "adapter_config.json").write_text(config.replace('"r": 4', '"r": 8'))
    said = cli(
        "--model", folder, "--port", 0, "--adapter", f"formal={tmp_path}", "--adapter", f"other={adapter_folder}"
    )
    assert said.exit_code == 2
    assert f"attnspan: --adapter formal={tmp_path}: peft cannot load it: " in said.stderr.splitlines()[-1]
    for file in folder.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    own = json.loads((adapter_folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": str(folder)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(own))
    said = cli("--model", tmp_path, "--port", 0, "--adapter", f"formal={adapter_folder}")
    assert "--model has an adapter of its own; give its base model" in said.stderr.splitlines()[-1]
    twice = [f"formal={adapter_folder}"] * 2
    said = cli("--model", folder, "--port", 0, "--adapter", twice[0], "--adapter", twice[1])
    assert "--adapter formal is given twice" in said.stderr.splitlines()[-1]


def children(pid):
    """Processes of a process, in the order in which they began, those that torch starts for its own use left out."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            text = status.read_text()
            line = (status.parent / "cmdline").read_text()
            if re.search(rf"^PPid:\s{pid}$", text, re.MULTILINE) and "resource_tracker" not in line:
                found.append(int(status.parent.name))
    return sorted(found)


def lives(pid):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return not re.search(r"^State:\s*[ZX]", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return False


def cli(*arguments):
    return CliRunner().invoke(app, ["serve", *map(str, arguments)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "./nowhere"], "--model must be a folder of a model, or a name that transformers finds"),
        (["--model", str(ROOT / "docs")], "transformers cannot load its model"),
        (["--port", "70000"], "port must be at most 65535, got 70000"),
        (["--host", "256.1.1.1"], "cannot listen on host '256.1.1.1', port 0"),
        (["--api-key", "käse"], "api_keys must be printable ASCII texts without spaces around them; one is not"),
        (["--max-n", "0"], "max_n must be a whole number >= 1, got 0"),
        (["--max-waiting", "-1"], "max_waiting must be a whole number >= 0, got -1"),
        (["--drain", "-1"], "drain must be seconds, at least 0, got -1"),
        (["--ranks", "0"], "--ranks must be a whole number >= 1, got 0"),
        (["--adapter", "formal"], "--adapter must be NAME=FOLDER, of an adapter that peft has saved, got 'formal'"),
        (["--adapter", "formal=./nowhere"], "--adapter must be NAME=FOLDER, of an adapter that peft has saved"),
        (["--prompt-lookup-num-tokens", "-1"], "prompt_lookup_num_tokens must be a whole number >= 0, got -1"),
        (["--pages", "0"], "pages must be a whole number >= 1, got 0"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_refused_in_one_line(folder, options, message):
    said = cli("--model", folder, "--port", 0, *options)
    assert said.exit_code == 2
    last = said.stderr.splitlines()[-1]
    assert last.startswith("attnspan: ")
    assert message in last
    assert "Traceback" not in said.output
    assert "käse" not in said.output


def test_what_is_not_installed_is_named(folder, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("attnspan.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    said = cli("--model", folder, "--ranks", 0)  # which is refused later
    assert said.exit_code == 2
    assert said.stderr.splitlines()[-1] == 'attnspan: uvicorn is not installed; run pip install "attnspan[serve]"'


def test_code_of_a_model_is_not_run_unless_it_is_trusted(folder, tmp_path):
    """A config that names code of its own: transformers refuses, and the code is not run."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text()
    own = '"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}'
    (tmp_path / "config.json").write_text(re.sub(r'"model_type": "llama"', own, config))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")
    said = cli("--model", tmp_path, "--port", 0)
    assert said.exit_code == 2
    assert "transformers cannot load its model" in said.stderr.splitlines()[-1]
    assert "trust_remote_code" in said.stderr
    assert not (tmp_path / "ran").exists()
    said = cli("--model", tmp_path, "--port", 0, "--trust-remote-code")
    assert said.exit_code != 0  # it is no model
    assert (tmp_path / "ran").exists()
