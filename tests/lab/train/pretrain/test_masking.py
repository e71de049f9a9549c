from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.train.pretrain import masked, vocabulary_of
from cairn.pipeline.model.folders.checkpoint import read_checkpoint


def test_masked_hides_the_share_as_bert_does_and_no_landmark(make_stream: Any, tiny_model_folder: Path):
    vocabulary = vocabulary_of(read_checkpoint(tiny_model_folder))
    stream = make_stream(batch_rows=40, max_tokens=90)
    plain = stream.batch(0)
    hidden, scored = masked(plain, 0.5, vocabulary, np.random.default_rng(0))
    assert len(scored) == round(0.5 * plain.is_text_N.sum())
    assert plain.is_text_N[scored].all()
    before, after = plain.rows.ids_N[scored], hidden.rows.ids_N[scored]
    shares = [
        (after == vocabulary.mask_id).mean(),
        ((after != vocabulary.mask_id) & (after != before)).mean(),
    ]
    assert shares == pytest.approx([0.8, 0.1], abs=0.04)
    unscored = np.setdiff1d(np.arange(len(plain.rows.ids_N)), scored)
    assert np.array_equal(plain.rows.ids_N[unscored], hidden.rows.ids_N[unscored])


def test_masked_scores_at_least_one_token(make_stream: Any, tiny_model_folder: Path):
    vocabulary = vocabulary_of(read_checkpoint(tiny_model_folder))
    assert len(masked(make_stream().batch(0), 1e-9, vocabulary, np.random.default_rng(0))[1]) == 1


def test_vocabulary_words_are_no_special_tokens(tiny_model_folder: Path):
    vocabulary = vocabulary_of(read_checkpoint(tiny_model_folder))
    assert vocabulary.mask_id == 4
    assert vocabulary.word_ids.min() == 5


def test_vocabulary_of_a_tokenizer_without_a_mask_is_refused(tiny_model_folder: Path, tmp_path: Path):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text().replace("[MASK]", "[NONE]"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="a tokenizer without"):
        vocabulary_of(read_checkpoint(folder))
