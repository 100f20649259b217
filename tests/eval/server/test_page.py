"""The web page: its files, and ten turns with it in a browser, at the widths of a telephone and of a desk."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from served_models import chat_model, text_model
from serving import Playback, service_of, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}},
    }
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
MARKDOWN = """# Head

Some *soft* and **strong** words, `code`, [a link](https://example.org/a) and [no link](javascript:alert(1)).

- one
- two
  1. inside

| a | b |
|---|---|
| 1 | <img src=x onerror=alert(1)> |

```python
print("<b>")
```
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = chat_model(tmp_path_factory, "the end of the story is the beginning")
    template = folder / "chat_template.jinja"
    template.write_text("{# <think> </think> #}" + template.read_text())
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Playback:
    return Playback(folder)


@pytest.fixture(scope="module")
def other(folder: Path) -> Playback:
    return Playback(folder)


@pytest.fixture(scope="module")
def url(folder: Path, engine: Playback, other: Playback) -> Iterator[str]:
    services = [service_of(engine, folder, max_length=8192), service_of(other, folder, name="other", max_length=8192)]
    with serving(*services) as (url, _):
        yield url


def test_the_page_needs_nothing_from_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = text_model(tmp_path_factory)
    with serving(service_of(Playback(folder), folder), key="a-long-key") as (url, _):
        page = httpx.get(url)
        files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
        assert sorted(files) == ["data:,", "page/markdown.js", "page/page.css", "page/page.js"]
        for name, kind in zip(sorted(files)[1:], ("text/javascript", "text/css", "text/javascript"), strict=True):
            found = httpx.get(f"{url}/{name}")
            assert found.headers["content-type"].startswith(kind)
            assert not re.search(r"https?://[a-z]|//cdn|@import|url\(|innerHTML|eval\(|document\.write", found.text)
            assert "script-src 'self'" in found.headers["content-security-policy"]
        assert httpx.get(f"{url}/page/../page/other.js").status_code in (401, 404)
        assert httpx.get(f"{url}/v1/models").status_code == 401
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not [word for word in ("http:", "https:", "//cdn", "style=", "onclick=", "@import") if word in page.text]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=[390, 1280])
def page(browser: Any, url: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": request.param, "height": 800})
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(url)
    page.locator("#model option").first.wait_for(state="attached")
    yield page
    context.close()
    assert problems == []


@pytest.fixture
def shot(page: Any, request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], None]:
    """Save a picture of the page; nothing of it may be wider than the window."""

    def save(name: str) -> None:
        width = page.viewport_size["width"]
        page.screenshot(path=tmp_path / f"{name}-{width}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    return save


def say(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def wait_for_answer(page: Any, count: int) -> None:
    page.locator("article").nth(count - 1).wait_for()
    page.locator("#send").wait_for()


def test_a_conversation_in_a_browser(page: Any, engine: Playback, other: Playback, shot: Callable[[str], None]) -> None:
    shot("empty")
    engine.answers += ["<think>\nWhich?\n</think>\n\n" + MARKDOWN, *(f"answer {number}" for number in range(2, 7))]
    say(page, "first <b>question</b>")
    wait_for_answer(page, 2)
    said = page.locator("article.assistant .said")
    assert said.locator("h1").inner_text() == "Head"
    assert said.locator("strong").inner_text() == "strong"
    assert said.locator("a").get_attribute("href") == "https://example.org/a"
    assert "[no link](javascript:alert(1))" in said.inner_text()
    assert said.locator("img").count() == 0
    assert said.locator("td").nth(1).inner_text() == "<img src=x onerror=alert(1)>"
    assert 'print("<b>")' in said.locator("pre").inner_text()
    assert page.locator("article.assistant details summary").inner_text() == "Reasoning"
    assert page.locator("article.user .said").inner_text() == "first <b>question</b>"
    assert "<|" not in page.locator("#turns").inner_text()
    shot("markdown")
    for number in range(2, 7):
        say(page, f"question {number}")
        wait_for_answer(page, 2 * number)
    assert "answer 5" in engine.prompts[-1]
    # edited: the turns after it are gone
    engine.answers += ["edited answer"]
    page.locator("article.user").nth(2).get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("another question")
    page.get_by_label("Edited message").press("Enter")
    page.get_by_text("edited answer").wait_for()
    assert page.locator("article").count() == 6
    assert "question 3" not in engine.prompts[-1].replace("another question", "")
    # again, of another model
    other.answers += ["the other model's answer"]
    page.select_option("#model", "other")
    page.locator("article.assistant").last.get_by_role("button", name="Retry").click()
    page.get_by_text("the other model's answer").wait_for()
    assert other.prompts[-1] == engine.prompts[-1]
    page.select_option("#model", "tiny")
    # stopped
    wait_for_answer(page, 6)
    engine.go.clear()
    engine.answers += ["never seen"]
    say(page, "wait")
    page.locator("#stop").click()
    page.get_by_text("stopped").wait_for()
    engine.go.set()
    # kept over a reload
    page.reload()
    page.locator("article").nth(7).wait_for()
    assert page.locator("article.user .said").first.inner_text() == "first <b>question</b>"
    # a new conversation, and back
    page.get_by_role("button", name="New chat").click()
    assert page.locator("article").count() == 0
    page.locator("#menu").click()
    page.locator("#chats button").first.click()
    assert page.locator("article").count() == 8


def test_tools_settings_and_probabilities_in_a_browser(
    page: Any, engine: Playback, shot: Callable[[str], None]
) -> None:
    page.locator("#open-settings").click()
    page.fill("#system", "Be the dog.")
    page.fill("#tools", json.dumps(TOOLS))
    page.select_option("#theme", "dark")
    shot("settings")
    page.locator("#open-settings").click()
    engine.answers += [CALL, "It is **sunny**."]
    say(page, "weather?")
    wait_for_answer(page, 2)
    assert "Calls weather" in page.locator("details.call").inner_text()
    assert '"place": "Rome"' in page.locator("details.call pre").inner_text()
    page.get_by_label("Result of weather").fill("22 degrees")
    page.get_by_role("button", name="Send results").click()
    page.locator("article.assistant strong").wait_for()
    assert "22 degrees" in engine.prompts[-1]
    assert "Be the dog." in engine.prompts[-1]
    shot("tools")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
    page.locator("#text").press("Control+Shift+O")
    assert page.locator("article").count() == 0
    page.reload()  # settings stay
    page.locator("#model option").first.wait_for(state="attached")
    assert page.input_value("#system") == "Be the dog."
    page.locator("#open-settings").click()
    page.fill("#tools", "not JSON")
    page.locator("#open-settings").click()
    say(page, "again")
    page.locator("article .error").wait_for()
    assert "JSON" in page.locator("article .error").inner_text()


@pytest.fixture(scope="module")
def drawn_url(folder: Path) -> Iterator[str]:
    from served_models import engine_for

    with serving(service_of(engine_for(folder), folder)) as (url, _):
        yield url


def test_probabilities_of_tokens_in_a_browser(browser: Any, drawn_url: str) -> None:
    page = browser.new_page(viewport={"width": 390, "height": 700})
    page.goto(drawn_url)
    page.locator("#model option").first.wait_for(state="attached")
    page.locator("#open-settings").click()
    page.check("#probabilities")
    page.fill("#max_tokens", "8")
    for mode in ("chat", "text"):
        page.select_option("#mode", mode)
        page.locator("#open-settings").click()
        say(page, "the end")
        wait_for_answer(page, 2)
        assert 1 <= page.locator(".tokens span").count() <= 8
        page.locator(".tokens span").filter(has_text=re.compile(r"\S")).first.click()  # parts of a character are empty
        assert page.locator("#tip tr").count() >= 9
        assert re.search(r"\d %", page.locator("#tip").inner_text())
        page.get_by_role("button", name="New chat").click()
        page.locator("#open-settings").click()
    page.close()


def test_an_image_in_a_browser(browser: Any, tmp_path: Path) -> None:
    from vision_language_models import make_service, picture, save_model

    (tmp_path / "model").mkdir()
    save_model("llava", tmp_path / "model")
    (tmp_path / "cat.png").write_bytes(picture(1))
    with serving(make_service(tmp_path / "model", "llava")) as (url, _):
        page = browser.new_page(viewport={"width": 390, "height": 700})
        page.goto(url)
        page.locator("#add-picture").wait_for()
        page.set_input_files("#picture", tmp_path / "cat.png")
        page.locator("#pictures img").wait_for()
        page.locator("#open-settings").click()
        page.fill("#max_tokens", "5")
        page.locator("#open-settings").click()
        say(page, "what is it?")
        wait_for_answer(page, 2)
        assert page.locator("article.user img").count() == 1
        assert page.locator("#pictures img").count() == 0
        assert re.search(r"llava · \d+ \+ 5 tokens", page.locator("article.assistant").inner_text())
        page.close()
