"""The page in a real browser: `make page`. It needs Chromium and npm, and the network for axe-core.

The page is clicked and typed through by a script inside of it, whose answers are read from the
document that the browser prints; axe-core looks at it in both colour schemes and three widths.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
from narrowfuzz.report.accepted import Accepted
from narrowfuzz.triage.finding import State, Story
from report.test_accepted import FINDING, OTHER, store
from report.test_page import VIEW, page

__all__ = ["store"]  # a fixture
AXE = "axe-core@4.14.1"
BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
#: Chromium's numbers of what a page may prefer.
SCHEMES = {"dark": 0, "light": 1}
#: What is asked of the page; ``answer`` becomes the document's last element.
ASK = """<script>%s</script><script>
addEventListener("load", async () => {
  const answer = %s;
  const said = document.createElement("pre");
  said.id = "answer"; said.textContent = JSON.stringify(await answer());
  document.body.append(said);
});
</script></body>"""


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("axe")
    if not shutil.which("npm"):
        pytest.fail("npm is needed to fetch axe-core")
    subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, check=True, timeout=120)
    (packed,) = folder.glob("axe-core-*.tgz")
    with tarfile.open(packed) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        return member.read().decode()


def browse(html: str, folder: Path, *, width: int, scheme: str, picture: str = "") -> str:
    """The document as it is after its scripts ran; with a picture of it if one is named."""
    if not BROWSER:
        pytest.fail("Chromium is needed")
    file = folder / "page.html"
    file.write_text(html)
    how = [
        BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}", f"--window-size={width},1400",
        f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--virtual-time-budget=8000",
    ]  # fmt: skip
    if picture:
        subprocess.run([*how, f"--screenshot={picture}", file.as_uri()], check=True, timeout=90,
                       capture_output=True)  # fmt: skip
    ran = subprocess.run(
        [*how, "--dump-dom", file.as_uri()], check=True, timeout=90, capture_output=True, text=True
    )
    return ran.stdout


def asked(store: Any, folder: Path, script: str, axe: str = "", **how: Any) -> Any:
    html = (store.out / "report.html").read_text()
    asking = html.replace("</body>", ASK % (axe, script))
    dom = browse(asking, folder, **({"width": 1280, "scheme": "light"} | how))
    said = dom.rpartition('<pre id="answer">')[2].partition("</pre>")[0]
    return json.loads(said.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


@pytest.fixture
def shown(store: Any) -> Any:
    """A run with findings, one of which shows its tensor and one a training."""
    long = msgspec.structs.replace(
        FINDING, sentence="output " + "wide " * 60, view=VIEW,
        conversion="def convert(model):\n    quantize_(model, " + "long_" * 40 + ")\n",
        first_bad=["first NaN: step 1, forward, " + "operator" * 40, "  before it, self: finite"],
    )  # fmt: skip
    store.add(long, "print('a line of a script that is rather long')\n" * 200)
    states = {arm: [State(0, 1.0, [0.0, 2.0]), State(3, top, [1.5, 2.0])]
              for arm, top in (("eager", 64.0), ("eager+checkpoint", 128.0))}  # fmt: skip
    story = Story(lines=["y0 = model(x0)"] * 4, event=3, broke="O14: state", slot="0 backward",
                  states=states)  # fmt: skip
    store.add(msgspec.structs.replace(OTHER, story=story), "")
    page(store, Accepted(frozenset({"O2--gone"})))
    return store


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [390, 820, 1400])
def test_axe_finds_nothing_serious_and_nothing_runs_out_of_the_page(
    shown: Any, tmp_path: Path, axe: str, scheme: str, width: int
) -> None:
    script = """async () => {
      for (const d of document.querySelectorAll("details")) d.open = true;
      const found = await axe.run();
      return {bad: found.violations.filter(v => ["serious", "critical"].includes(v.impact))
                .map(v => v.id + ": " + v.nodes.map(n => n.html).join(" | ")),
              wide: document.documentElement.scrollWidth, room: document.documentElement.clientWidth};
    }"""
    pictures = os.environ.get("NARROWFUZZ_PICTURES", "")
    picture = f"{pictures}/page-{scheme}-{width}.png" if pictures else ""
    said = asked(shown, tmp_path, script, axe, width=width, scheme=scheme, picture=picture)
    assert said["bad"] == []
    assert said["wide"] <= said["room"]


def test_no_finding_is_wider_than_a_phone(shown: Any, tmp_path: Path) -> None:
    """In a frame of 400 pixels: a window of the browser may not be as narrow."""
    script = """async () => {
      for (const d of document.querySelectorAll("details")) d.open = true;
      const frame = document.createElement("iframe");
      frame.style.width = "400px"; frame.srcdoc = document.documentElement.outerHTML
        .replaceAll(/<script>[^]*?<\\/script>/g, "");
      const loaded = new Promise(done => frame.onload = done);
      document.body.append(frame); await loaded;
      const page = frame.contentDocument.documentElement;
      const right = [...frame.contentDocument.querySelectorAll("article")]
        .map(card => card.getBoundingClientRect().right);
      return {wide: page.scrollWidth, room: page.clientWidth, right: Math.max(...right)};
    }"""
    said = asked(shown, tmp_path, script)
    assert said["wide"] <= said["room"] <= 400 and said["right"] <= 400


def test_search_and_level_choose_what_is_shown(shown: Any, tmp_path: Path) -> None:
    script = """async () => {
      const shown = () => [...document.querySelectorAll("article")].filter(a => !a.hidden).map(a => a.id);
      const at = (field, value, event) => { field.value = value; field.dispatchEvent(new Event(event)); };
      const all = shown();
      at(search, "DIFFERS on REPEAT", "input"); const one = shown();
      at(search, "", "input"); at(least, "2", "change"); const high = shown();
      at(search, "nothing has this", "input");
      return {all, one, high, none: shown(), said: document.getElementById("shown").textContent};
    }"""
    said = asked(shown, tmp_path, script)
    assert sorted(said["all"]) == sorted([FINDING.id, "abcdef012345"])
    assert said["one"] == said["high"] == ["abcdef012345"]
    assert said["none"] == [] and said["said"] == "0 shown"


def test_terms_explain_themselves_by_mouse_and_by_keyboard(shown: Any, tmp_path: Path) -> None:
    script = """async () => {
      const term = [...document.querySelectorAll(".term")].find(t => t.textContent === "configuration");
      const box = document.getElementById("means"), seen = [];
      const look = () => seen.push(box.hidden ? "" : box.textContent);
      term.dispatchEvent(new Event("mouseenter")); look();
      term.dispatchEvent(new Event("mouseleave")); look();
      term.focus(); look();
      term.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"})); look();
      term.click(); look(); term.blur(); look();
      return {seen, order: [...document.querySelectorAll("button, input, select, summary, [tabindex]")]
        .every(e => e.tabIndex === 0)};
    }"""
    said = asked(shown, tmp_path, script)
    opened = [bool(text) for text in said["seen"]]
    assert opened == [True, False, True, False, True, False] and said["order"]
    assert said["seen"][0].startswith("What was converted")


def test_a_script_is_copied_or_selected(shown: Any, tmp_path: Path) -> None:
    script = """async () => {
      const copy = document.querySelector(".copy"), script = copy.closest("details").querySelector("pre");
      copy.closest("details").open = true; copy.click();
      await new Promise(done => setTimeout(done, 500));
      return {said: copy.textContent, selected: getSelection().toString().length, there: script.textContent.length};
    }"""
    said = asked(shown, tmp_path, script)
    assert said["said"] == "Copied" or (
        said["said"].startswith("Selected") and said["selected"] >= said["there"] - 1
    )
