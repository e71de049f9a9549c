"""Pretraining: runs on a tiny model, the loss of masked words, and the stream of texts of two languages."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import ConfigError, ModelError, SourceError
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.packed_rows import own_places
from cairn.pipeline.lab.train.pairs import read_texts
from cairn.pipeline.lab.train.pretrain import (
    MaskedPart,
    masked,
    pretrain_terms,
    vocabulary_of,
)
from cairn.pipeline.lab.train.settings import PretrainConfig, TrainConfig
from cairn.pipeline.lab.train.token_stream import TokenStream, smoothed
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.types import silent_progress
from safetensors.torch import load_file

from tests.lab.train.conftest import FAMILIES, PRETRAIN, tiny_new
from tests.model.published import SIZES, transformers_model


@pytest.fixture
def make_stream(texts_file, tiny_model_folder):
    """Return a maker of streams over these texts."""

    def make(**settings: Any) -> TokenStream:
        config = PretrainConfig(**{**PRETRAIN, **settings})
        return TokenStream(
            read_texts([texts_file]), read_checkpoint(tiny_model_folder), config, silent_progress
        )

    return make


@pytest.fixture
def run(start):
    """Return what pretrains on the texts."""
    return partial(start, "pretrain")


def terms(folder: Path, name: str = "terms") -> list[dict[str, float]]:
    return [record[name] for record in read_log(folder / "log.jsonl") if name in record]


def test_pretrain_loss_falls_and_the_saved_folder_is_served_as_its_rows_were_read(
    run, tmp_path, tiny_model_folder
):
    report = run(steps=25, evaluate_every=25, checkpoint_every=25)
    held = [
        record["heldout_loss"]
        for record in read_log(tmp_path / "run" / "log.jsonl")
        if "heldout_loss" in record
    ]
    assert held[-1] < 0.8 * held[0]
    assert (report.best_step, report.details["best_loss"]) == (25, pytest.approx(held[-1]))
    config = encoder_config({"model": str(tmp_path / "run" / "model"), "precision": "fp32"})
    assert (config.pooling, config.attention) == ("lmk", "full")
    assert load_backbone(config).model_dim == 32
    assert not (tmp_path / "run" / "changes.safetensors").exists()
    named = set(load_file(tiny_model_folder / "model.safetensors"))  # none is the bias of the output
    assert set(load_file(tmp_path / "run" / "model" / "model.safetensors")) == named
    assert not (tmp_path / "run" / "model" / "cairn_extra.safetensors").exists()


def test_pretrain_micro_batches_change_nothing_but_rounding(run, tmp_path):
    for name, tokens in (("whole", 10_000), ("parts", 60)):
        run(name, steps=1, micro_batch_tokens=tokens, matryoshka_dims=(8, 32))
    whole, parts = terms(tmp_path / "whole")[0], terms(tmp_path / "parts")[0]
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_tokens": 97}, "max_tokens must be at most the model's 96 positions, got 97"),
        ({"matryoshka_layers": (1,)}, "must end with the model's last layer 2"),
        ({"matryoshka_dims": (8, 33)}, "between 1 and the base model's 32"),
        ({"batch_rows": 5_000}, "must fill the 5000 rows of a batch, got"),
        ({"from_config": {"model_type": "t5", "num_hidden_layers": 2}}, "model_type must be one of bert"),
        ({"from_config": {}}, "must give num_hidden_layers or"),
        ({"from_config": {**SIZES, "vocab_size": 10}}, "vocab_size of a new model must be at least"),
        ({"from_config": {**SIZES, "hidden_size": -1}}, "hidden_size or dim as a positive number"),
    ],
)
def test_pretrain_of_what_no_model_has_is_refused(run, tmp_path, settings, sentence):
    if "from_config" in settings:
        config = {"model_type": "bert", **settings["from_config"]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        settings = {"how": {"from_config": tmp_path / "config.json"}}
    with pytest.raises((ModelError, ConfigError, SourceError), match=sentence):
        run(**settings)


def test_pretrain_of_a_base_or_texts_that_do_not_fit_is_refused(
    run, tiny_latent_folder, tiny_model_folder, tmp_path, texts_file
):
    with pytest.raises(ModelError, match="must start from a transformer without"):
        run(base=str(tiny_latent_folder))
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer.replace("[MASK]", "[NONE]"))
    with pytest.raises(ModelError, match="a tokenizer without"):
        run(base=str(folder))
    texts_file.write_text(texts_file.read_text().replace('"de"', '"en"'))
    with pytest.raises(ConfigError, match="several languages, got en; leave it out"):
        run(language_smoothing=0.7)


def test_masked_hides_the_share_as_bert_does_and_no_landmark(make_stream, tiny_model_folder):
    vocabulary = vocabulary_of(read_checkpoint(tiny_model_folder))
    stream = make_stream(batch_rows=40, max_tokens=90)
    plain = stream.batch(0)
    hidden, scored = masked(plain, 0.5, vocabulary, np.random.default_rng(0))
    assert len(scored) == round(0.5 * len(own_places(plain)))
    assert np.isin(scored, own_places(plain)).all()
    before, after = plain.ids[scored], hidden.ids[scored]
    shares = [
        (after == vocabulary.mask_id).mean(),
        ((after != vocabulary.mask_id) & (after != before)).mean(),
    ]
    assert shares == pytest.approx([0.8, 0.1], abs=0.04)
    unscored = np.setdiff1d(np.arange(len(plain.ids)), scored)
    assert np.array_equal(plain.ids[unscored], hidden.ids[unscored])
    assert (vocabulary.mask_id, vocabulary.word_ids.min()) == (4, 5), "words are no special tokens"


SCORED = 0.3


def part_of(stream: Any, folder: Path, step: int = 0) -> MaskedPart:
    plain = stream.batch(step)
    vocabulary = vocabulary_of(read_checkpoint(folder))
    hidden, scored = masked(plain, SCORED, vocabulary, np.random.default_rng(step))
    return MaskedPart(
        rows=hidden,
        ids_N=plain.ids.astype(np.int64),
        scored_K=scored,
        num_scored=len(scored),
    )


def m3bert_of(folder: Path) -> tuple[LandmarkEncoder, torch.nn.Parameter]:
    model = LandmarkEncoder(tiny_new("m3bert", folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4.0
    bias = torch.randn(len(model.token_table), generator=torch.Generator().manual_seed(0))
    return model, torch.nn.Parameter(bias)


def total_written_out(
    llama: Any, bias: torch.Tensor, part: MaskedPart, widths: tuple[int, ...]
) -> dict[tuple[int, int], torch.Tensor]:
    """m³BERT's L_MLM of each layer and width (§2.1): a Llama's whose tokens all see each other (§2.2)."""
    losses: dict[tuple[int, int], torch.Tensor] = Counter()
    ends = np.cumsum(part.rows.lengths)
    for start, end in zip(ends - part.rows.lengths, ends, strict=True):
        ids = torch.from_numpy(part.rows.ids[None, start:end].astype(np.int64))
        mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
        given = {"use_cache": False, "output_hidden_states": True}
        found = llama(input_ids=ids, attention_mask=mask, **given).hidden_states
        states = {1: llama.norm(found[1]), 2: found[2]}  # of the last layer they are normed
        scored = part.scored_K[(part.scored_K >= start) & (part.scored_K < end)]
        labels = torch.from_numpy(part.ids_N[scored])
        for layer, width in itertools.product((1, 2), widths):
            head = llama.embed_tokens.weight[:, :width]
            logits = states[layer][0, scored - start, :width] @ head.T + bias
            losses[layer, width] += F.cross_entropy(logits, labels, reduction="sum") / part.num_scored
    return losses


def test_mlm_over_layers_and_widths_equals_the_papers_total_and_its_gradient(make_stream, tiny_model_folder):
    model, own_bias = m3bert_of(tiny_model_folder)
    part = part_of(make_stream(), tiny_model_folder)
    config = {**tiny_new("m3bert", tiny_model_folder).config, "model_type": "llama"}
    llama = transformers_model(config, model.published_tensors())
    bias, widths = own_bias.detach().clone().requires_grad_(), (4, 16, 32)
    losses = total_written_out(llama, bias, part, widths)
    total = torch.stack(list(losses.values())).sum()
    total.backward()
    config = PretrainConfig(steps=1, matryoshka_layers=(1, 2), matryoshka_dims=widths)
    terms = pretrain_terms(model, own_bias, part, config)
    terms["mlm"].backward()
    assert terms["mlm"].item() == pytest.approx(total.item(), rel=1e-5)
    for (layer, width), loss in losses.items():
        assert terms[f"mlm/{layer}/{width}"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(own_bias.grad, bias.grad, atol=1e-5)
    for name, weight in llama.named_parameters():
        difference = (model.get_parameter(name).grad - weight.grad).abs().max()
        assert difference <= 1e-5 * max(1.0, float(weight.grad.abs().max())), name


@pytest.mark.parametrize("attention", ["chunk", "full"])
def test_three_stages_of_an_m3bert_end_in_a_folder_served_at_fewer_layers_and_dimensions(
    run, tmp_path, pairs_file, attention
):
    sizes = tmp_path / "m3bert.json"
    sizes.write_text(json.dumps({"model_type": "m3bert", **SIZES, **FAMILIES["m3bert"]}))
    exits: dict[str, Any] = {"matryoshka_layers": (1, 2), "matryoshka_dims": (8, 32)}
    run("first", steps=2, how={"from_config": sizes}, **exits)
    run("second", steps=2, base=str(tmp_path / "first" / "best"), language_smoothing=0.7, **exits)
    settings = TrainConfig(
        steps=3, batch_pairs=12, max_document_tokens=48, attention=attention, context_documents=0,
        distillation_weight=0.0, schedule="cosine", heldout_pairs=6, precision="fp32", **exits,
    )  # fmt: skip
    report = train([pairs_file], tmp_path / "third", settings, base=str(tmp_path / "second" / "model"))
    assert report.steps == 3
    folder = str(tmp_path / "third" / "model")
    assert json.loads((Path(folder) / "config.json").read_text())["matryoshka_dims"] == [8, 32]
    vectors: list[np.ndarray] = []
    for cut in ({}, {"dims": 8}, {"layers": 1, "dims": 8}):
        config = encoder_config({"model": folder, "precision": "fp32", **cut})
        encoder = DocumentEncoder(config, None, load_backbone(config))
        vectors.append(encoder.encode_queries(["the old stone path"])[0])
    whole, narrow, shallow = vectors
    assert (len(whole), len(narrow), len(shallow)) == (32, 8, 8)
    assert narrow == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-5)
    assert np.abs(narrow - shallow).max() > 1e-3


CLS, LANDMARK = 2, 3


def words_of(texts_file: Path, folder: Path) -> Counter[int]:
    tokenizer = read_checkpoint(folder).tokenizer
    lines = texts_file.read_text().splitlines()
    return Counter(
        token
        for line in lines
        for token in tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids
    )


def parts(batch: Any) -> list[np.ndarray]:
    return np.split(batch.ids, np.cumsum(batch.lengths)[:-1])


@pytest.mark.parametrize("heldout_rows", [0, 3])
def test_stream_an_epoch_reads_every_token_that_is_not_held_out_once(
    make_stream, texts_file, tiny_model_folder, heldout_rows
):
    stream = make_stream(heldout_rows=heldout_rows, batch_rows=1, steps=1_000)
    rows = [stream.batch(step) for step in range(stream.num_rows)]
    held = [stream.lay_out(stream.heldout, np.random.default_rng(0))] if heldout_rows else []
    found: Counter[int] = Counter()
    for row in (*rows, *held):
        found.update(row.ids[own_places(row)].tolist())
    lengths = [len(row.ids) for row in rows]
    assert found == words_of(texts_file, tiny_model_folder)
    assert max(lengths) <= 48
    assert np.mean(lengths) > 0.8 * 48
    assert not np.array_equal(stream.batch(0).ids[:20], make_stream(seed=1).batch(0).ids[:20])


def test_stream_part_begins_with_cls_and_landmarks_end_chunks_of_intervals_that_vary(make_stream):
    kinds: list[set[int]] = []
    for part in parts(make_stream(max_tokens=90).batch(3)):
        assert part[0] == CLS
        assert part[-1] == LANDMARK
        chunks = np.diff(np.flatnonzero(np.isin(part, [CLS, LANDMARK]))) - 1
        kinds.append(set(chunks[:-1].tolist()))
        assert 1 <= chunks[-1] <= 8
    assert set().union(*kinds) == {4, 8}
    assert {4, 8} in kinds, "intervals vary within a part"
    for part in parts(make_stream(landmark_intervals=()).batch(0)):
        assert np.flatnonzero(np.isin(part, [CLS, LANDMARK])).tolist() == [0, len(part) - 1]


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0])
def test_stream_languages_are_drawn_by_their_smoothed_share(make_stream, exponent):
    stream = make_stream(steps=2_000, batch_rows=10, heldout_rows=0, language_smoothing=exponent)
    tokens = np.array([sum(end - start for row in rows for start, end in row) for rows in stream._rows_of])
    drawn = np.bincount(stream._language_S) / 20_000
    assert np.abs(drawn - tokens**exponent / (tokens**exponent).sum()).max() < 0.015


def test_smoothed_shares_equal_the_papers_formula():
    sizes = np.array([900.0, 90.0, 10.0])
    shares = smoothed(sizes, 0.7)
    assert shares == pytest.approx([0.8049, 0.1606, 0.0345], abs=1e-4)
    assert shares.sum() == pytest.approx(1.0)
    assert smoothed(np.array([5.0, 0.0]), 0.0).tolist() == [1.0, 0.0]
