"""The OpenVINO runtime, imported without the usage statistics it would send.

On import the package reports to its maker through ``openvino_telemetry``, from a forked process, unless that
package cannot be imported. Nothing leaves a machine because of Cairn, so here it cannot.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Final

_REPORTER: Final = "openvino_telemetry"


def _import_silently() -> tuple[Any, Any]:
    """Return the runtime and its operations; another's earlier import of the reporter is left as it is."""
    found: ModuleType | None = sys.modules.get(_REPORTER)
    if found is None:
        sys.modules[_REPORTER] = None  # type: ignore[assignment] - how Python marks a module that must not be imported
    try:
        return importlib.import_module("openvino"), importlib.import_module("openvino.opset13")
    finally:
        if found is None:
            del sys.modules[_REPORTER]


ov, op = _import_silently()
