"""A model folder may hold anything; what cannot be read ends in one sentence without its content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import CairnError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LONG = "x" * 50_000

odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.sampled_from([LONG, "", "0", [], [1, [LONG]], {}, {LONG: LONG}]),
)


def require_sentence_or_success(folder: Path) -> None:
    try:
        load_encoder(str(folder)).encode_documents(["a cairn marks the way"])
        sentence = ""
    except CairnError as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert len(sentence) < 2_000


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "special_tokens_map.json"])
@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_folder_with_odd_values_loads_or_is_refused_in_one_sentence(
    tiny_model_folder: Path, tmp_path: Path, name: str, data: st.DataObject
) -> None:
    folder = tmp_path / "model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tiny_model_folder, folder)
    path = folder / name
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    keys = sorted({*content, "sep_token", "rope_theta", "model_type", "layer_types", "auto_map"})
    changes = data.draw(st.dictionaries(st.sampled_from(keys), odd_values, min_size=1, max_size=3))
    path.write_text(json.dumps(content | changes))
    require_sentence_or_success(folder)
