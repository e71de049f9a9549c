"""Texts of two languages, and runs on a tiny model."""

from __future__ import annotations

import copy
import itertools
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import (
    ConfigError,
    ModelError,
)
from cairn.pipeline.lab.train.contrastive import train
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pretrain import (
    EnhancedDecoder,
    MaskedPart,
    PretrainHeads,
    PretrainReport,
    decoder_draws,
    masked,
    pretrain,
    pretrain_terms,
    sampled_visibility,
    vocabulary_of,
)
from cairn.pipeline.lab.train.settings import PretrainConfig, TrainConfig
from cairn.pipeline.lab.train.token_stream import TokenStream
from cairn.pipeline.lab.train.trainer import read_log
from cairn.pipeline.lab.train.training_files import read_texts
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.model_defaults import encoder_config
from cairn.pipeline.types import silent_progress
from safetensors.torch import load_file

from tests.lab.train.families import FAMILIES, SIZES, tiny_new
from tests.m3bert_reference import states_by_layer

RUN_SETTINGS: Final[dict[str, Any]] = {
    "steps": 6,
    "batch_rows": 4,
    "max_tokens": 48,
    "landmark_intervals": (4, 8),
    "heldout_rows": 4,
    "evaluate_every": 3,
    "checkpoint_every": 2,
    "peak_lr": 3e-3,
    "micro_batch_tokens": 100,
    "precision": "fp32",
}


@pytest.fixture
def make_stream(texts_file: Path, tiny_model_folder: Path) -> Callable[..., TokenStream]:
    """Return a maker of streams over these texts."""

    def make(**settings: Any) -> TokenStream:
        config = PretrainConfig(**{**RUN_SETTINGS, **settings})
        return TokenStream(
            read_texts([texts_file]), read_checkpoint(tiny_model_folder), config, silent_progress
        )

    return make


@pytest.fixture
def run(texts_file: Path, tiny_model_folder: Path, tmp_path: Path) -> Any:
    """Return a starter of runs, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def start(name: str = "run", progress: Any = silent_progress, **settings: Any) -> PretrainReport:
        given = {key: settings.pop(key) for key in ("base", "from_config", "processes") if key in settings}
        return pretrain(
            [texts_file],
            tmp_path / name,
            PretrainConfig(**{**RUN_SETTINGS, **settings}),
            progress=progress,
            **{"base": str(tiny_model_folder), **given},
        )

    yield start
    torch.set_num_threads(threads)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def terms(folder: Path, name: str = "terms") -> list[dict[str, float]]:
    return [record[name] for record in read_log(folder / "log.jsonl") if name in record]


def new_config(tmp_path: Path, family: str) -> Path:
    path = tmp_path / f"{family}.json"
    path.write_text(json.dumps({"model_type": family, **SIZES, **FAMILIES[family]}))
    return path


@pytest.mark.parametrize("objective", ["mlm", "retromae"])
def test_pretrain_loss_falls_and_the_saved_folder_is_served_as_its_rows_were_read(
    run: Any, tmp_path: Path, objective: str
):
    report = run(objective=objective, steps=25, evaluate_every=25, checkpoint_every=25)
    held = [
        record["heldout_loss"]
        for record in read_log(tmp_path / "run" / "log.jsonl")
        if "heldout_loss" in record
    ]
    assert held[-1] < 0.8 * held[0]
    assert (report.best_step, report.best_loss) == (25, pytest.approx(held[-1]))
    config = encoder_config({"model": str(tmp_path / "run" / "model"), "precision": "fp32"})
    assert (config.pooling, config.attention) == ("lmk", "full")
    assert load_backbone(config).model_dim == 32
    assert not (tmp_path / "run" / "changes.safetensors").exists()


def test_pretrain_decoder_and_bias_stay_out_of_the_saved_model(
    run: Any, tmp_path: Path, tiny_model_folder: Path
):
    run(objective="retromae", steps=2)
    assert set(weights(tmp_path / "run")) == set(load_file(tiny_model_folder / "model.safetensors"))
    assert not (tmp_path / "run" / "model" / "cairn_extra.safetensors").exists()


@pytest.mark.parametrize("family", FAMILIES)
def test_pretrain_new_weights_of_any_family_are_read_by_the_engine(run: Any, tmp_path: Path, family: str):
    report = run(
        steps=2, from_config=new_config(tmp_path, family), matryoshka_layers=(1, 2), matryoshka_dims=(8, 32)
    )
    assert report.last_loss < report.first_loss + 1.0
    folder = tmp_path / "run" / "model"
    whole, first = (
        load_backbone(EncoderConfig(model=str(folder), precision="fp32", layers=layers))
        for layers in (None, 1)
    )
    ids, lengths = np.array([[2, 7, 8, 9, 3]]), np.array([5])
    vectors = [backbone.hidden_states(ids, lengths) for backbone in (whole, first)]
    assert all(bool(torch.isfinite(x).all()) for x in vectors)
    assert not torch.allclose(*vectors)
    assert json.loads((folder / "config.json").read_text())["matryoshka_dims"] == [8, 32]


@pytest.mark.parametrize("objective", ["mlm", "retromae"])
def test_pretrain_micro_batches_change_nothing_but_rounding(run: Any, tmp_path: Path, objective: str):
    for name, tokens in (("whole", 10_000), ("parts", 60)):
        run(name, objective=objective, steps=1, micro_batch_tokens=tokens, matryoshka_dims=(8, 32))
    whole, parts = terms(tmp_path / "whole")[0], terms(tmp_path / "parts")[0]
    assert parts == pytest.approx(whole, rel=1e-5)


def test_pretrain_several_processes_make_the_step_of_one(
    in_threads: Any, texts_file: Path, tiny_model_folder: Path, tmp_path: Path
):
    config = PretrainConfig(
        steps=2, batch_rows=4, max_tokens=48, precision="fp32", objective="retromae", heldout_rows=0
    )

    def start(processes: Any) -> Any:
        return pretrain(
            [texts_file],
            tmp_path / f"of {processes.size}",
            config,
            base=str(tiny_model_folder),
            processes=processes,
        )

    in_threads(2, start)
    in_threads(1, start)
    one, two = (terms(tmp_path / f"of {size}") for size in (1, 2))
    assert all(a == pytest.approx(b, rel=1e-4) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_tokens": 97}, "max_tokens must be at most the model's 96 positions, got 97"),
        ({"matryoshka_layers": (1,)}, "must end with the model's last layer 2"),
        ({"matryoshka_dims": (8, 33)}, "between 1 and the base model's 32"),
    ],
)
def test_pretrain_settings_that_the_model_lacks_are_refused(
    run: Any, settings: dict[str, Any], sentence: str
):
    with pytest.raises(ConfigError, match=sentence):
        run(**settings)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "t5", "num_hidden_layers": 2}, "model_type must be one of bert"),
        ({"model_type": "bert"}, "num_hidden_layers of a new model must be a whole number"),
        ({"model_type": "bert", **SIZES, "vocab_size": 10}, "vocab_size of a new model must be at least"),
        ({"model_type": "bert", **SIZES, "hidden_size": -1}, "hidden_size as a positive number"),
    ],
)
def test_pretrain_configuration_that_no_model_has_is_refused(
    run: Any, tmp_path: Path, config: dict[str, Any], sentence: str
):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises((ModelError, ConfigError), match=sentence):
        run(from_config=path)


def test_pretrain_of_a_model_with_a_latent_attention_is_refused(run: Any, tiny_latent_folder: Path):
    with pytest.raises(ModelError, match="must start from a transformer without"):
        run(base=str(tiny_latent_folder))


DIM, HEADS, LENGTHS = 8, 2, [5, 1, 3]


def decoder_of(seed: int = 0) -> EnhancedDecoder:
    generator = torch.Generator().manual_seed(seed)
    decoder = EnhancedDecoder(DIM, HEADS, 10, generator)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return decoder


def written_out(
    decoder: EnhancedDecoder, sentence: torch.Tensor, tokens: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """RetroMAE's eq. 4-7 for one text, token by token and head by head."""
    positions, half = decoder.positions, DIM // HEADS
    key_inputs = [sentence, *(token + positions[i + 1] for i, token in enumerate(tokens))]
    keys_values = [decoder.key_value(decoder.input_norm(x)) for x in key_inputs]
    rebuilt: list[torch.Tensor] = []
    for i in range(len(tokens)):
        start = decoder.input_norm(sentence + positions[i + 1])
        query = decoder.query(start)
        visible = [0, *(j + 1 for j in range(len(tokens)) if seen[i, j])]
        heads: list[torch.Tensor] = []
        for head in range(HEADS):
            own = slice(head * half, (head + 1) * half)
            values = slice(DIM + head * half, DIM + (head + 1) * half)
            scores = torch.stack([query[own] @ keys_values[j][own] for j in visible]) / math.sqrt(half)
            shares = scores.softmax(0)
            heads.append(
                sum(share * keys_values[j][values] for share, j in zip(shares, visible, strict=True))
            )
        x = decoder.attention_norm(start + decoder.output(torch.cat(heads)))
        rebuilt.append(decoder.output_norm(x + decoder.down(F.gelu(decoder.up(x)))))
    return torch.stack(rebuilt)


def test_decoder_equals_the_equations_written_out_with_their_gradient():
    generator = torch.Generator().manual_seed(1)
    sentences = torch.randn(3, DIM, generator=generator)
    tokens = torch.randn(sum(LENGTHS), DIM, generator=generator)
    visible = [sampled_visibility(length, 0.5, generator) for length in LENGTHS]
    ours, theirs = decoder_of(), decoder_of()
    found = ours(sentences, tokens, LENGTHS, visible)
    expected = torch.cat(
        [
            written_out(theirs, sentence, part, seen)
            for sentence, part, seen in zip(sentences, tokens.split(LENGTHS), visible, strict=True)
        ]
    )
    assert torch.allclose(found, expected, atol=1e-5)
    weights = torch.randn(found.shape, generator=generator)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None
        assert torch.allclose(mine.grad, other.grad, atol=1e-4)


def test_decoder_state_of_a_token_does_not_depend_on_itself_or_on_what_it_does_not_see():
    generator = torch.Generator().manual_seed(2)
    decoder, sentence = decoder_of(), torch.randn(1, DIM, generator=generator)
    tokens = torch.randn(6, DIM, generator=generator)
    seen = sampled_visibility(6, 0.5, generator)
    before = decoder(sentence, tokens, [6], [seen])
    for changed in range(6):
        other = tokens.clone()
        other[changed] += torch.randn(DIM, generator=generator)
        moved = (decoder(sentence, other, [6], [seen]) - before).abs().amax(1) > 1e-6
        assert moved.tolist() == seen[:, changed].tolist()
        assert not moved[changed]


def test_sampled_visibility_shows_the_share_and_never_the_token_itself():
    seen = sampled_visibility(300, 0.3, torch.Generator().manual_seed(0))
    assert not seen.diagonal().any()
    assert abs(float(seen.float().mean()) - 0.7 * 299 / 300) < 0.01
    assert len({tuple(row.tolist()) for row in seen}) == 300


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


SCORED = 0.3


def part_of(stream: Any, folder: Path, step: int = 0) -> MaskedPart:
    plain = stream.batch(step)
    vocabulary = vocabulary_of(read_checkpoint(folder))
    hidden, scored = masked(plain, SCORED, vocabulary, np.random.default_rng(step))
    words = int(plain.is_text_N.sum())
    return MaskedPart(
        plain=plain,
        hidden=hidden,
        scored_K=scored,
        first=0,
        step=step,
        num_scored=len(scored),
        num_words=words,
    )


def m3bert_of(folder: Path) -> tuple[LandmarkEncoder, PretrainHeads]:
    model = LandmarkEncoder(tiny_new("m3bert", folder))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 4.0
    bias = torch.randn(len(model.token_table), generator=torch.Generator().manual_seed(0))
    return model, PretrainHeads(bias, None)


def total_written_out(
    weights: Mapping[str, torch.Tensor], bias: torch.Tensor, part: MaskedPart, widths: tuple[int, ...]
) -> dict[tuple[int, int], torch.Tensor]:
    """m³BERT's L_MLM of each layer and width, row by row and word by word."""
    losses: dict[tuple[int, int], list[torch.Tensor]] = {}
    ends = np.cumsum(part.plain.rows.lengths_B)
    for start, end in zip(ends - part.plain.rows.lengths_B, ends, strict=True):
        ids = torch.from_numpy(part.hidden.rows.ids_N[start:end].astype(np.int64))
        states = states_by_layer(weights, ids, num_heads=4, theta=10_000.0)
        for place in part.scored_K[(part.scored_K >= start) & (part.scored_K < end)]:
            for layer, width in itertools.product((1, 2), widths):
                head = weights["embed_tokens.weight"].T[:width]
                shares = (states[layer - 1][place - start, :width] @ head + bias).softmax(0)
                loss = -shares[part.plain.rows.ids_N[place]].log()
                losses.setdefault((layer, width), []).append(loss)
    return {exit_: torch.stack(of_words).mean() for exit_, of_words in losses.items()}


def test_mlm_over_layers_and_widths_equals_the_papers_total_and_its_gradient(
    make_stream: Any, tiny_model_folder: Path
):
    model, heads = m3bert_of(tiny_model_folder)
    part = part_of(make_stream(), tiny_model_folder)
    weights = {name: tensor.clone().requires_grad_() for name, tensor in model.published_tensors().items()}
    bias, widths = heads.bias.detach().clone().requires_grad_(), (4, 16, 32)
    losses = total_written_out(weights, bias, part, widths)
    total = torch.stack(list(losses.values())).sum()
    total.backward()
    config = PretrainConfig(steps=1, matryoshka_layers=(1, 2), matryoshka_dims=widths)
    terms = pretrain_terms(model, heads, part, config)
    terms["mlm"].backward()
    assert terms["mlm"].item() == pytest.approx(total.item(), rel=1e-5)
    for (layer, width), loss in losses.items():
        assert terms[f"mlm/{layer}/{width}"].item() == pytest.approx(loss.item(), rel=1e-5)
    assert torch.allclose(heads.bias.grad, bias.grad, atol=1e-5)
    for name, weight in weights.items():
        if weight.grad is not None:
            difference = (model.get_parameter(name).grad - weight.grad).abs().max()
            assert difference <= 1e-5 * max(1.0, float(weight.grad.abs().max())), name
    assert sum(weight.grad is not None for weight in weights.values()) == 2 + 9 * 2


def test_retromae_equals_encoder_loss_plus_every_word_rebuilt_from_the_landmarks(
    make_stream: Any, tiny_model_folder: Path
):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    decoder = EnhancedDecoder(32, 4, 48, torch.Generator().manual_seed(1), model.position_table)
    heads = PretrainHeads(torch.zeros(len(model.token_table)), decoder)
    config = PretrainConfig(steps=1, objective="retromae", landmark_intervals=(4, 8), decoder_mask_share=0.5)
    part = part_of(make_stream(), tiny_model_folder)
    found = pretrain_terms(model, heads, part, config)
    states = model.read_alone(part.hidden.rows)[1]
    ends = np.cumsum(part.plain.rows.lengths_B)
    losses: list[torch.Tensor] = []
    for row, (start, end) in enumerate(zip(ends - part.plain.rows.lengths_B, ends, strict=True)):
        is_text = part.plain.is_text_N[start:end]
        landmarks = [place for place in range(1, end - start) if not is_text[place]]
        sentence = torch.stack([states[start + place] for place in landmarks]).mean(0)
        words = torch.from_numpy(part.plain.rows.ids_N[start:end][is_text].astype(np.int64))
        seen = sampled_visibility(len(words), 0.5, decoder_draws(0, part.step, row))
        rebuilt = decoder(sentence[None], model.token_table[words], [len(words)], [seen])
        losses.append(F.cross_entropy(rebuilt @ model.token_table.T, words, reduction="sum"))
    assert found["decoder"].item() == pytest.approx(
        torch.stack(losses).sum().item() / part.num_words, rel=1e-5
    )
    assert found["mlm"].item() == pytest.approx(pretrain_terms(model, heads, part, config)["mlm"].item())


def test_retromae_trains_the_landmarks_alone_through_the_decoder(make_stream: Any, tiny_model_folder: Path):
    """The gradient of the decoder's loss reaches the encoder, and only through what is pooled."""
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    heads = PretrainHeads(
        torch.zeros(len(model.token_table)), EnhancedDecoder(32, 4, 48, torch.Generator().manual_seed(1))
    )
    part = part_of(make_stream(), tiny_model_folder)
    config = PretrainConfig(steps=1, objective="retromae", landmark_intervals=(4, 8))
    kept: list[torch.Tensor] = []
    real = model.states

    def watched(*arguments: Any, **named: Any) -> dict[int, torch.Tensor]:
        states = real(*arguments, **named)
        kept.append(states[model.num_layers])
        kept[-1].retain_grad()
        return states

    model.states = watched  # type: ignore[method-assign]
    pretrain_terms(model, heads, part, config)["decoder"].backward()
    is_read = kept[0].grad.abs().amax(1) > 0
    is_cls = np.zeros(len(part.plain.rows.ids_N), np.bool_)
    is_cls[np.cumsum(part.plain.rows.lengths_B) - part.plain.rows.lengths_B] = True
    assert is_read.tolist() == (~part.plain.is_text_N & ~is_cls).tolist()


def test_retromae_without_landmarks_is_rebuilt_from_cls(make_stream: Any, tiny_model_folder: Path):
    model = LandmarkEncoder(read_checkpoint(tiny_model_folder))
    heads = PretrainHeads(
        torch.zeros(len(model.token_table)), EnhancedDecoder(32, 4, 48, torch.Generator().manual_seed(1))
    )
    config = PretrainConfig(steps=1, objective="retromae")
    part = part_of(make_stream(landmark_intervals=()), tiny_model_folder)
    before = pretrain_terms(model, heads, part, config)["decoder"].item()
    real = model.states
    moved = copy.copy(part.plain.rows.lengths_B)

    def with_other_ends(*arguments: Any, **named: Any) -> dict[int, torch.Tensor]:
        states = {layer: x.clone() for layer, x in real(*arguments, **named).items()}
        states[model.num_layers][np.cumsum(moved) - 1] += 5.0
        return states

    model.states = with_other_ends  # type: ignore[method-assign]
    assert pretrain_terms(model, heads, part, config)["decoder"].item() == before


@pytest.mark.parametrize("attention", ["chunk", "landmark"])
def test_three_stages_of_an_m3bert_end_in_a_folder_served_at_fewer_layers_and_dimensions(
    run: Callable[..., Any], tmp_path: Path, pairs_file: Path, attention: Any
):
    sizes = tmp_path / "m3bert.json"
    sizes.write_text(json.dumps({"model_type": "m3bert", **SIZES, **FAMILIES["m3bert"]}))
    exits: dict[str, Any] = {"matryoshka_layers": (1, 2), "matryoshka_dims": (8, 32)}
    run("first", steps=2, from_config=sizes, **exits)
    run("second", steps=2, base=str(tmp_path / "first" / "best"), language_smoothing=0.7, **exits)
    settings = TrainConfig(
        steps=3, batch_pairs=12, max_document_tokens=48, attention=attention, context_documents=0,
        distillation_weight=0.0, schedule="cosine", heldout_pairs=6, precision="fp32", **exits,
    )  # fmt: skip
    report = train([pairs_file], tmp_path / "third", settings, base=str(tmp_path / "second" / "model"))
    assert report.steps == 3
    folder = str(tmp_path / "third" / "model")
    vectors: list[np.ndarray] = []
    for cut in ({}, {"dims": 8}, {"layers": 1, "dims": 8}):
        config = encoder_config({"model": folder, "precision": "fp32", **cut})
        encoder = DocumentEncoder(config, None, load_backbone(config))
        vectors.append(encoder.encode_queries(["the old stone path"])[0])
    whole, narrow, shallow = vectors
    assert (len(whole), len(narrow), len(shallow)) == (32, 8, 8)
    assert narrow == pytest.approx(whole[:8] / np.linalg.norm(whole[:8]), abs=1e-5)
    assert np.abs(narrow - shallow).max() > 1e-3
