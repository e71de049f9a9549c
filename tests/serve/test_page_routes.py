"""The page's files as they are served.

They need no key, name no other server, and their policy lets nothing else run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cairn.pipeline.serve import page_routes
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.page_routes import PAGE_PATHS
from cairn.pipeline.serve.settings import ServeSettings

ASSETS = Path(page_routes.__file__).parent / "page_assets"
VENDORED = {"d3.min.js"}
MAX_BYTES = 2 << 20


def test_everything_the_page_names_is_served(client):
    found = set(re.findall(r'(?:src|href)="(page/[^"]+)"', client.get("/").text))
    for path in PAGE_PATHS - {"/"}:
        if path.rpartition("/")[2] not in VENDORED and path.endswith((".js", ".css")):
            found |= {
                f"page/{name}" for name in re.findall(r'(?:from "\./|url\(")([^"]+)"', client.get(path).text)
            }
    assert {f"/{name}" for name in found} == set(PAGE_PATHS) - {"/"}


TYPES = {
    "css": "text/css",
    "html": "text/html",
    "js": "text/javascript",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
}


def test_every_file_comes_without_a_key_with_its_type_and_the_policy_that_lets_nothing_else_run(
    served_root, serve, tmp_path
):
    KeyFile(tmp_path / "keys.json").create("somebody")
    client = serve(ServeSettings(root=served_root, keys_file=tmp_path / "keys.json"))
    assert client.get("/v1/collections").status_code == 401
    own = {"script-src 'self'", "style-src 'self'", "connect-src 'self'"}
    for path in PAGE_PATHS:
        answer = client.get(path)
        assert answer.status_code == 200
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind == TYPES["html" if path == "/" else path.rpartition(".")[2]]
        policy = answer.headers["content-security-policy"].split("; ")
        assert policy[0] == "default-src 'none'"
        assert own | {"require-trusted-types-for 'script'"} <= set(policy)
        assert not any(word in " ".join(policy) for word in ("unsafe", "http:", "https:", "*", "data:"))


def test_page_names_no_other_place_and_holds_no_script_of_its_own():
    page = (ASSETS / "index.html").read_text(encoding="utf-8")
    assert re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|<style|javascript:", page) == []
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
    for path in [*ASSETS.glob("*.js"), *ASSETS.glob("*.css"), ASSETS / "index.html"]:
        if path.name not in VENDORED:
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
            assert "//" not in re.sub(r"(?m)(^|\s)//.*$", "", text), path.name
            assert re.findall(unsafe, text) == []


def test_what_is_shipped_is_small_and_has_its_licences():
    assert sum(path.stat().st_size for path in ASSETS.iterdir()) < MAX_BYTES
    assert "SIL OPEN FONT LICENSE" in (ASSETS / "inter.LICENSE").read_text(encoding="utf-8")


def test_page_is_kept_while_it_is_the_same(client):
    first = client.get("/")
    again = client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/", headers={"If-None-Match": '"another"'}).status_code == 200


@pytest.mark.parametrize(
    "name", ["", "none.js", "..%2fapp.py", "%2e%2e/app.py", "inter.LICENSE", "index.html"]
)
def test_nothing_else_is_served(client, name):
    assert client.get(f"/page/{name}").status_code == 404
    assert client.get("/index.html").status_code == 404
