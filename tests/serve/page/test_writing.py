"""Files that are dropped on the page, and documents that are deleted from it, where it may write."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.page.conftest import ask

pytestmark = pytest.mark.xdist_group("page")

DROP = """files => {
  const data = new DataTransfer();
  for (const [name, text] of Object.entries(files)) data.items.add(new File([text], name));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def writable(page_root, start, tmp_path_factory):
    root = shutil.copytree(page_root, tmp_path_factory.mktemp("writable") / "root")
    return start(ServeSettings(root=Path(root), writable=True, deadline_seconds=300.0))


@pytest.mark.slow
def test_dropped_files_are_found_corrected_and_deleted(visit, writable):
    tab = visit("#collection=pebbles", at=writable)
    tab.locator(".drop").wait_for()
    ask(tab, "chrysolite", "Granite")
    tab.evaluate(DROP, {"gem.md": "# Gem\nchrysolite is green", "gem.exe": "MZ", "gone.md": ""})
    state = tab.locator("#uploads li")
    state.get_by_text("added", exact=True).wait_for()
    state.locator(".complaint", has_text="of a kind that is read").wait_for()
    assert state.filter(has_text="gone.md").inner_text() == "gone.md It is empty."
    tab.locator("#holds", has_text="3 documents").wait_for()
    tab.locator(".hit h2", has_text="Gem").wait_for()
    correction = {"name": "gem.md", "mimeType": "", "buffer": b"# Peridot\nchrysolite is olive"}
    tab.locator("#uploads input").set_input_files([correction])
    tab.locator(".hit h2", has_text="Peridot").wait_for()
    tab.locator(".hit .open", has_text="Peridot").click()
    answers, asked = [False, True], list[str]()

    def answer(question):
        asked.append(question.message)
        (question.accept if answers.pop(0) else question.dismiss)()

    tab.on("dialog", answer)
    for _ in range(2):
        assert tab.locator("#holds", has_text="3 documents").count() == 1
        tab.locator("#document .delete").click()
    tab.locator("#holds", has_text="2 documents").wait_for()
    tab.locator(".hit h2", has_text="Peridot").wait_for(state="detached")
    assert asked == ["Delete “Peridot” from pebbles? Searches will not find it any more."] * 2
    assert tab.locator("#document .text").count() == 0


@pytest.mark.slow
def test_first_files_make_a_collection(visit, start, tmp_path):
    address = start(ServeSettings(root=tmp_path, writable=True, deadline_seconds=300.0))
    tab = visit("", at=address)
    tab.locator(".drop").wait_for()
    tab.get_by_text("makes one, and so do files that are dropped here.").wait_for()
    tab.on("dialog", lambda question: question.accept("gems"))
    tab.evaluate(DROP, {f"{name}.txt": f"{name} is a stone" for name in ("ruby", "opal", "jade")})
    for place in range(3):
        tab.locator("#uploads li", has_text="added").nth(place).wait_for()
    tab.locator("#holds", has_text="3 documents").wait_for()
    ask(tab, "opal", "opal")
    assert tab.input_value("#collection") == "gems"
    assert tab.request.get(f"{address}/v1/collections/gems").json()["generation"] == 1


def test_server_that_takes_no_writes_offers_none(tab):
    tab.locator(".hit .open").first.click()
    tab.locator("#document .text").wait_for()
    assert not tab.locator("#uploads").is_visible()
    assert tab.locator("#document .delete").count() == 0
