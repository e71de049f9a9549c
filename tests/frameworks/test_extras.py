"""Cairn without its extras: a missing one is named."""

from __future__ import annotations

import subprocess
import sys

from tests.test_house import FRAMEWORKS, ROOT


def test_extra_that_is_missing_is_named() -> None:
    extras = {
        "cairn.pipeline.client.clients": ("httpx2", "client"),
        "cairn.langchain": ("langchain-core", "langchain"),
        "cairn.llama_index": ("llama-index-core", "llama-index"),
        "cairn.haystack": ("haystack-ai", "haystack"),
        "cairn.pipeline.frameworks.mcp_server": ("mcp", "mcp"),
    }
    program = (
        f"import importlib, sys\nfor name in {FRAMEWORKS}: sys.modules[name] = None\n"
        f"from cairn.pipeline.errors import ConfigError\nfor module in {[*extras]}:\n"
        "    try:\n        importlib.import_module(module)\n"
        "    except ConfigError as error:\n        print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for sentence, (package, extra) in zip(said.splitlines(), extras.values(), strict=True):
        assert f"must have the package {package}, got none; " in sentence
        assert f"install it with `pip install '.[{extra}]'`" in sentence
