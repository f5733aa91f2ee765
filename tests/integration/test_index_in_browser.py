"""The index's page in headless Chromium: two widths, light and dark, by keyboard alone, and by axe-core.

Not run where Chromium, playwright or axe-core is missing. To have them: ``apt-get install chromium``,
``pip install --group browser``; npm brings axe-core, or it lies where ``AXE_CORE`` says (``axe.min.js``).
``INDEX_PICTURES`` names a folder to keep a picture of each case in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.base.fetch import sha256
from scripts.wheels.index import local_server, static_index
from tests.unit.index_wheels import CUDA, PYTHON, make, prove, upstream

WIDTHS, SCHEMES = (1200, 360), ("light", "dark")
TORCH_CUDA = {"2.12.1": "13.0", "2.11.0": "13.0", "2.10.0": "12.8", "2.6.0": "12.4"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="not run: playwright is missing")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("not run: no Chromium")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if told := os.environ.get("AXE_CORE"):
        return Path(told)
    folder = tmp_path_factory.mktemp("axe")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("not run: no axe-core (AXE_CORE), and no npm to bring it")
    done = subprocess.run(
        [npm, "pack", "--silent", "axe-core@4"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"not run: npm brought no axe-core: {done.stderr.strip()[-200:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as packed:
        member = packed.extractfile("package/axe.min.js")
        assert member is not None
        (folder / "axe.min.js").write_bytes(member.read())
    return folder / "axe.min.js"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An index with every kind of row: proved, not proved, yanked, of Python alone; and variants."""
    folder = tmp_path_factory.mktemp("site")
    proved = make(folder / "dist")
    prove(proved, sha256=sha256(proved))
    make(folder / "dist", build="24_hdim64_sm80", facts={"architectures": ["80"]})
    make(folder / "dist", PYTHON)
    old = make(folder / "dist", PYTHON, version="4.0.0b35+det.1", facts=upstream("4.0.0b35"))
    (folder / "yanked.toml").write_text(f'format = 1\n[wheels]\n"{old.name}" = "wrong at head dim 96"\n')
    request = static_index.Request(
        folder / "dist", yanked=folder / "yanked.toml", variants=True, torch_cuda=TORCH_CUDA
    )
    static_index.write(request, folder / "out")
    server = local_server.server(folder / "out")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def opened(browser: Any, address: str, width: int, scheme: str, **options: Any) -> Any:
    """A page; what it asks for and what its script complains of are its ``seen``."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options)
    page = context.new_page()
    page.seen = []
    page.on("request", lambda request: page.seen.append(request.url))
    page.on("console", lambda message: page.seen.append(message.text))
    page.on("pageerror", lambda error: page.seen.append(str(error)))
    page.goto(address)
    return page


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_it_fits_its_width_asks_for_nothing_and_axe_finds_nothing(
    browser: Any, axe: Path, address: str, width: int, scheme: str
) -> None:
    page = opened(browser, address, width, scheme, bypass_csp=True)  # to bring axe in
    assert page.seen == [address]
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.add_script_tag(path=str(axe))
    found = page.evaluate("axe.run(document)")
    assert len(found["passes"]) > 30
    assert [(each["id"], [node["html"] for node in each["nodes"]]) for each in found["violations"]] == []
    assert [each["id"] for each in found["incomplete"]] == []
    if kept := os.environ.get("INDEX_PICTURES"):
        page.screenshot(path=f"{kept}/index-{width}-{scheme}.png", full_page=True)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_wheel_is_picked_by_keyboard_alone(browser: Any, address: str, width: int) -> None:
    page = opened(browser, address, width, "light")
    reached = []

    def press(key: str) -> str:
        page.keyboard.press(key)
        name: str = page.evaluate(
            "(() => { const e = document.activeElement; return e.name || e.getAttribute('aria-label') || e.textContent; })()"
        )
        return name

    for _ in range(9):
        reached.append(press("Tab"))
        # What has the focus shows it, and lies in the window.
        assert page.evaluate("document.activeElement.matches(':focus-visible')"), reached[-1]
    assert reached == [
        "Skip to the table of wheels",
        *("package", "gpu", "cuda", "torch"),
        f"flash_attn-{CUDA['version']}-24_hdim64_sm90-{CUDA['tag']}.whl",
        *("Copy the line for pip", "Copy the line for uv", "Copy the line for uv with wheel variants"),
    ]
    assert "sm90" in page.inner_text("#answer")
    for _ in range(6):
        press("Shift+Tab")
    press("ArrowRight")  # from H100 to A100
    assert "sm80" in page.inner_text("#answer")
    assert page.inner_text("#answer").count(f"{address}files/flash_attn-2.8.3.post1") == 2
    press("ArrowRight")
    press("ArrowRight")
    press("ArrowRight")  # to RTX 50, which none serves
    assert "serves RTX 50" in page.inner_text("#answer")
    assert "Copy" not in page.inner_text("#answer")


def test_the_keyboard_skips_to_the_table_and_opens_a_wheel_s_lines(browser: Any, address: str) -> None:
    page = opened(browser, address, 1200, "light")
    for key in ("Tab", "Enter", "Tab", "Tab", "Enter"):
        page.keyboard.press(key)
    assert page.locator("details").first.evaluate("(each) => each.open")
    assert f"{address}simple/" in page.locator("code.line").first.inner_text() or (
        f"{address}files/" in page.locator("code.line").first.inner_text()
    )


def test_copying_gives_the_line_and_says_so(browser: Any, address: str) -> None:
    page = opened(browser, address, 1200, "light", permissions=["clipboard-read", "clipboard-write"])
    page.click("button >> nth=0")
    page.wait_for_function("document.querySelector('button').textContent === 'Copied'")
    assert page.get_attribute("button >> nth=0", "aria-label") == "Copied the line for pip"
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied.startswith("pip install ")
    assert "\n" not in copied
    assert "INDEX_URL" not in copied


def test_without_javascript_the_table_says_all(browser: Any, address: str) -> None:
    page = opened(browser, address, 360, "dark", java_script_enabled=False)
    assert not page.is_visible("#picker")
    assert page.is_visible("noscript")
    assert page.locator("tbody tr").count() == 4
    assert page.is_visible("text=Yanked: wrong at head dim 96")
    assert page.is_visible("text=proved on NVIDIA H100 (9.0), 2992 cases passed")
