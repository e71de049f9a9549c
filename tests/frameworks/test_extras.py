"""Cairn without its extras: no framework is imported unless used, and a missing extra is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("langchain_core", "llama_index", "haystack", "mcp", "httpx2", "httpx", "openai")


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout


def test_cairn_imports_no_framework_by_itself() -> None:
    loaded = json.loads(
        run(
            "import json, sys, cairn.cli.main, cairn.pipeline.collection, cairn.pipeline.client.errors, "
            "cairn.pipeline.frameworks.source\n"
            "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
        )
    )
    assert set(loaded) & set(FRAMEWORKS) == set()


def test_extra_that_is_missing_is_named() -> None:
    extras = {
        "cairn.pipeline.client.clients": ("httpx2", "client"),
        "cairn.langchain": ("langchain-core", "langchain"),
        "cairn.llama_index": ("llama-index-core", "llama-index"),
        "cairn.haystack": ("haystack-ai", "haystack"),
        "cairn.pipeline.frameworks.mcp_server": ("mcp", "mcp"),
    }
    said = run(
        f"import importlib, sys\nfor name in {FRAMEWORKS}: sys.modules[name] = None\n"
        f"from cairn.pipeline.errors import ConfigError\nfor module in {[*extras]}:\n"
        "    try:\n        importlib.import_module(module)\n"
        "    except ConfigError as error:\n        print(error)"
    )
    for sentence, (package, extra) in zip(said.splitlines(), extras.values(), strict=True):
        assert f"must have the package {package}, got none; " in sentence
        assert f"install it with `pip install '.[{extra}]'`" in sentence
