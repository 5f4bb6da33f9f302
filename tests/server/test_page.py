"""The page at / chats with the model and shows pages and queue, in a browser, and fetches nothing from elsewhere."""

import json
import os
import re
import shutil
import signal
import subprocess

import pytest
from starlette.responses import HTMLResponse

from attnspan.server import api
from attnspan.server.api import Api
from attnspan.server.api_errors import Json
from tests.engine.models import tokenizer
from tests.pace import stretched
from tests.server.servers import ask, expected, running, templated, until

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed")

CHAT = """
<script>
addEventListener("load", async () => {
  const when = async (holds) => { while (!holds()) await new Promise((go) => setTimeout(go, 50)); };
  await when(() => document.querySelectorAll("#numbers dd").length);
  $("longest").value = 24;
  for (const text of TEXTS) {
    $("text").value = text;
    $("form").requestSubmit();
    await when(() => running);
    await when(() => !running);
  }
  await watch();
  const said = [...document.querySelectorAll("#log p")].map((line) => [line.dataset.role, line.textContent]);
  const names = [...document.querySelectorAll("#numbers dt")].map((each) => each.textContent);
  const values = [...document.querySelectorAll("#numbers dd")].map((each) => each.textContent);
  const overflow = document.documentElement.scrollWidth - innerWidth;
  const told = JSON.stringify({said, names, values, overflow, model: $("model").textContent});
  await fetch("health?told=" + encodeURIComponent(told));
});
</script>
"""


def test_it_is_one_file_that_needs_nothing_else():
    with running() as server:
        status, headers, text = ask(server, "GET", "/")
    assert status == 200
    assert re.findall(r"https?:|src=|@import|url\(|innerHTML|eval\(", text) == []
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def told(monkeypatch, tmp_path, texts, window="1000,800", **options):
    """What the page has after a chat; it tells by a request of its own."""
    heard = []

    async def listen(self, request):
        heard.append(json.loads(request.query_params["told"]))
        return Json({})

    monkeypatch.setattr(Api, "health", listen)
    with running(**options) as server:
        page = ask(server, "GET", "/")[2] + CHAT.replace("TEXTS", json.dumps(texts))
        monkeypatch.setattr(api, "HTMLResponse", lambda _, headers: HTMLResponse(page, headers=headers))
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
        flags += ["--hide-scrollbars", "--no-proxy-server", f"--user-data-dir={tmp_path}", f"--window-size={window}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        # A port to debug it keeps the browser open; nobody connects to it.
        with subprocess.Popen([BROWSER, *flags, "--remote-debugging-port=0", server.address], **quiet) as browser:
            try:
                until(lambda: heard, stretched(90))
            finally:
                os.killpg(browser.pid, signal.SIGKILL)
    return heard[0]


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("window", ["1000,800", "400,800"])
def test_it_chats_and_shows_what_the_engine_holds(monkeypatch, tmp_path, window):
    texts = ["the cat", "<b>the</b> hat & mat"]
    found = told(monkeypatch, tmp_path, texts, window)
    messages, said = [], []
    for text in texts:
        messages.append({"role": "user", "content": text})
        answer = expected(templated(messages), max_new_tokens=24).text
        messages.append({"role": "assistant", "content": answer})
        said += [["user", text], ["assistant", answer]]
    assert found["said"] == said
    assert found["model"] == "tiny"
    assert found["overflow"] <= 0
    numbers = dict(zip(found["names"], found["values"], strict=True))
    assert numbers["tokens generated"] == "48"
    assert (numbers["used"], numbers["running"], numbers["waiting"]) == ("0", "0", "0")
    assert int(numbers["free"]) + int(numbers["cached prefixes"]) == 512


@needs_browser
@pytest.mark.slow
def test_a_model_without_a_template_continues_texts(monkeypatch, tmp_path):
    plain = tokenizer()
    bare = type(plain)(tokenizer_object=plain.backend_tokenizer, eos_token="<end>")
    found = told(monkeypatch, tmp_path, ["the cat"], tokenizer=bare)
    assert found["said"] == [["user", "the cat"], ["assistant", expected("the cat", max_new_tokens=24).text]]
