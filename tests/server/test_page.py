"""The live page in a real browser, before a real server with real content: the picture is right, it moves, nothing fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live import Running

from maru_core import protocol as p
from maru_core.session import Session
from maru_server import web as web_module
from maru_server.web import Web
from support import await_condition, hashes, namespace

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install -e '.[dev]'")
if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
    pytest.skip("there is no browser here: tools/browser.sh installs one", allow_module_level=True)

from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.chrome.service import Service as Driver  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.remote.webelement import WebElement  # noqa: E402

PAGE_BYTES = 50_000


class Site:
    """A server with two namespaces: one with a trunk of 10 pages and branches of 20 and 5, one with 5 pages."""

    def __init__(self, tmp_path: Path) -> None:
        self.running = Running(tmp_path)
        self.session = Session(self.running.endpoint, name="writer", timeout_s=60)
        self.large = self.session.open_namespace(namespace(model="large-model").record())
        self.small = self.session.open_namespace(namespace(model="small-model").record())
        self.trunk = self.store(self.large, hashes(10, seed=1))
        self.wide = self.store(self.large, hashes(20, seed=2), self.trunk[-32:])
        self.narrow = self.store(self.large, hashes(5, seed=3), self.trunk[-32:])
        self.alone = self.store(self.small, hashes(5, seed=4))
        self.web = Web(self.running.service, ("127.0.0.1", 0))

    def store(self, number: int, chain: bytes, parent: bytes = p.ROOT) -> bytes:
        reserved = self.session.reserve(number, "kv", 0, 1, parent, chain, PAGE_BYTES)
        assert set(self.session.commit(reserved.slots, reserved.generations).status) == {0}
        return chain

    def close(self) -> None:
        self.session.close()
        self.running.stop()
        self.web.close()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for limit in ("HEALTH_S", "CALL_S"):  # a refusal would be an error in the browser's log
        monkeypatch.setattr(web_module, limit, 60.0)
    monkeypatch.setattr(web_module, "HISTORY_STEP_S", 0.25)  # a line needs several points
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def browsers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Browsers by colour scheme and size; each is started once."""
    started: dict[tuple[object, ...], Any] = {}

    def get(width: int = 1280, height: int = 800, dark: bool = False) -> Any:
        if (width, height, dark) not in started:
            options = webdriver.ChromeOptions()
            options.binary_location = str(shutil.which("chromium"))
            for argument in (
                "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                "--disable-background-networking", f"--user-data-dir={tmp_path_factory.mktemp('profile')}",
            ):  # fmt: skip
                options.add_argument(argument)
            options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
            driver = webdriver.Chrome(options=options, service=Driver(shutil.which("chromedriver")))
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
            )
            media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
            started[width, height, dark] = driver
        return started[width, height, dark]

    yield get
    for driver in started.values():
        driver.quit()


class Page:
    """What a visitor sees."""

    def __init__(self, driver: Any, site: Site) -> None:
        self.driver = driver
        driver.get("about:blank")  # the page before asks a server that is gone
        driver.get_log("browser")
        driver.get(site.web.url)
        await_condition(lambda: self.runs() and self.text("used") != "–", "the page shows the server")

    def text(self, name: str) -> str:
        return str(self.driver.find_element(By.ID, name).text)

    def runs(self) -> list[dict[str, Any]]:
        """All rectangles of the tree."""
        found: list[dict[str, Any]] = self.driver.execute_script(
            """return [...document.querySelectorAll('#tree g')].map(g => { const box = g.querySelector('rect').getBoundingClientRect();
            return { label: g.getAttribute('aria-label'), style: g.getAttribute('class'), hash: g.querySelector('rect').dataset.hash,
            bytes: +g.querySelector('rect').dataset.bytes, x: box.x, y: box.y, width: box.width, text: g.textContent,
            fill: getComputedStyle(g.querySelector('rect')).fill }; })"""
        )
        return found

    def run(self, chain: bytes) -> WebElement:
        found: WebElement = self.driver.find_element(By.CSS_SELECTOR, f'#tree rect[data-hash="{chain[:32].hex()}"]')
        return found

    def at(self, chain: bytes, deed: Callable[[WebElement], object]) -> None:
        """Do something with the rectangle of a run, which is drawn anew when figures come."""

        def done() -> bool:
            try:
                deed(self.run(chain))
            except StaleElementReferenceException:
                return False
            return True

        await_condition(done, "the rectangle stays for a moment")

    def by_hash(self) -> dict[str, dict[str, Any]]:
        return {run["hash"]: run for run in self.runs() if run["hash"]}

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]


@pytest.fixture
def page(browsers: Callable[..., Any], site: Site) -> Iterator[Page]:
    shown = Page(browsers(), site)
    yield shown
    assert not shown.errors()
    shown.driver.get("about:blank")


def test_rectangles_are_as_wide_as_their_bytes(page: Page, site: Site) -> None:
    runs = page.runs()
    widest = max(run["width"] for run in runs)
    total = 40 * PAGE_BYTES
    by_hash = page.by_hash()
    for chain, pages in ((site.trunk, 35), (site.wide, 20), (site.narrow, 5), (site.alone, 5)):
        run = by_hash[chain[:32].hex()]
        assert run["bytes"] == pages * PAGE_BYTES
        assert run["width"] == pytest.approx(
            pages / 40 * sum(r["width"] for r in runs if "namespace" in r["style"]), rel=0.02
        )
    assert sum(run["bytes"] for run in runs if "namespace" in run["style"]) == total
    assert widest > 800


def test_branches_lie_under_their_trunk(page: Page, site: Site) -> None:
    by_hash = page.by_hash()
    trunk, wide, narrow = (by_hash[chain[:32].hex()] for chain in (site.trunk, site.wide, site.narrow))
    for branch in (wide, narrow):
        assert branch["y"] > trunk["y"]
        assert trunk["x"] - 1 <= branch["x"]
        assert branch["x"] + branch["width"] <= trunk["x"] + trunk["width"] + 1
    assert wide["x"] + wide["width"] <= narrow["x"] + 1


def test_pointing_shows_the_hash_and_clicking_looks_closer(page: Page, site: Site) -> None:
    page.at(site.wide, lambda run: ActionChains(page.driver).move_to_element(run).perform())
    details = page.text("details")
    assert site.wide[:32].hex() in details
    assert site.wide[-32:].hex() in details
    assert "large-model" in details
    page.at(site.narrow, lambda run: run.click())
    by_hash = page.by_hash()
    assert by_hash[site.narrow[:32].hex()]["width"] == pytest.approx(by_hash[site.trunk[:32].hex()]["width"])
    assert site.alone[:32].hex() not in by_hash
    assert site.narrow[:32].hex() in page.text("details")
    page.driver.find_element(By.ID, "whole").click()
    assert site.alone[:32].hex() in page.by_hash()


def test_the_keyboard_reaches_every_run(page: Page, site: Site) -> None:
    for _ in page.runs():
        ActionChains(page.driver).send_keys("\ue004").perform()  # Tab
        if site.alone[:32].hex() in page.text("details"):
            break
    assert site.alone[:32].hex() in page.text("details")
    ActionChains(page.driver).send_keys("\ue007").perform()
    assert site.trunk[:32].hex() not in page.by_hash()


def test_what_is_looked_at_stays_when_figures_come_anew(page: Page, site: Site) -> None:
    page.at(site.narrow, lambda run: run.click())
    more = site.store(site.large, hashes(7, seed=8), site.narrow[32:64])
    await_condition(lambda: more[:32].hex() in page.by_hash(), "the new branch")
    assert len(page.by_hash()) == 4
    assert site.alone[:32].hex() not in page.by_hash()


def test_colour_is_when_it_was_used(page: Page, site: Site) -> None:
    def age(state: Any) -> None:
        tree = state.books.trees[site.small]
        tree.last_use[: tree.size] -= 3 * 3600 * 10**9

    before = page.by_hash()[site.alone[:32].hex()]
    site.running.service.call(age)
    await_condition(lambda: page.by_hash()[site.alone[:32].hex()]["style"] != before["style"], "the colour")
    by_hash = page.by_hash()
    assert by_hash[site.alone[:32].hex()]["fill"] != by_hash[site.wide[:32].hex()]["fill"]
    site.session.touch(site.small, site.alone)
    await_condition(lambda: page.by_hash()[site.alone[:32].hex()]["fill"] == before["fill"], "it is hot again")


def test_numbers_move_with_what_happens(page: Page, site: Site) -> None:
    used = page.text("used-of")
    assert page.text("pages") == "40"
    site.store(site.small, hashes(10, seed=9), site.alone[-32:])
    for _ in range(5):
        site.session.match(site.small, ["kv"], 0, site.alone + hashes(5, seed=11))
    await_condition(lambda: page.text("pages") == "50", "more pages")
    assert page.text("used-of") != used
    await_condition(lambda: "50 %" in page.text("hits"), "the hit rate")
    await_condition(lambda: "not stored" in page.text("misses"), "the reason for the misses")
    await_condition(lambda: "µs" in page.text("median") or "ms" in page.text("median"), "the time of a request")
    assert "small-model" in page.text("namespaces")
    assert "Match" in page.text("kinds")
    lines = "return document.querySelectorAll('#chart-used path').length"
    await_condition(lambda: page.driver.execute_script(lines) == 2, "the line of the chart and its area")


def test_a_server_that_is_gone_is_said_and_one_that_is_back_too(page: Page, site: Site) -> None:
    assert page.text("health") == "serving"
    port = int(site.web.url.rpartition(":")[2])
    site.web.close()
    await_condition(lambda: "no answer" in page.text("health"), "the page says so")
    site.web = Web(site.running.service, ("127.0.0.1", port))
    await_condition(lambda: page.text("health") == "serving", "it is back")
    page.errors()  # requests that failed are told there, as they should


def test_names_are_text_and_never_markup(browsers: Callable[..., Any], site: Site) -> None:
    evil = "<img src=x onerror=document.title='hacked'><script>document.title='hacked'</script>"
    number = site.session.open_namespace(namespace(model=evil, tag=evil).record())
    site.store(number, hashes(30, seed=12))
    page = Page(browsers(), site)
    await_condition(lambda: evil in page.text("namespaces"), "the name is shown as it is")
    assert page.driver.title == "Maru"
    assert not page.driver.find_elements(By.TAG_NAME, "img")
    assert not page.errors()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_it_fits_the_window_and_can_be_read(
    browsers: Callable[..., Any], site: Site, width: int, height: int, dark: bool
) -> None:
    page = Page(browsers(width, height, dark), site)
    await_condition(lambda: len(site.web._history) > 1, "a line in the charts")
    assert page.driver.execute_script("return innerWidth") == width
    assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width
    contrast = page.driver.execute_script(
        """const light = c => { const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => { x /= 255;
        return x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4; }); return .2126 * v[0] + .7152 * v[1] + .0722 * v[2]; };
        const of = (a, b) => { const [x, y] = [light(a), light(b)].sort((m, n) => n - m); return (x + .05) / (y + .05); };
        const card = getComputedStyle(document.querySelector('section')).backgroundColor;
        const texts = [...document.querySelectorAll('h2, b, .soft, td, th')].map(e => of(getComputedStyle(e).color, card));
        const runs = [...document.querySelectorAll('#tree g')].filter(g => g.querySelector('text')).map(g =>
          of(getComputedStyle(g.querySelector('text')).fill, getComputedStyle(g.querySelector('rect')).fill));
        const steps = [0, 1, 2, 3, 4, 5].map(n => { const s = getComputedStyle(document.documentElement);
          const hex = name => { const h = s.getPropertyValue(name).trim().slice(1);
            return `rgb(${[0, 2, 4].map(i => parseInt(h.slice(i, i + 2), 16)).join(', ')})`; };
          return of(hex(`--h${n}`), hex(`--t${n}`)); });
        return Math.min(...texts, ...runs, ...steps);"""
    )
    assert contrast >= 4.5
    background = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == dark
    assert not page.errors()
