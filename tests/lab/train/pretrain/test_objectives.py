from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pretrain import (
    OBJECTIVES,
    EnhancedDecoder,
    MaskedPart,
    PretrainHeads,
    _generator,
    masked,
    sampled_visibility,
    vocabulary_of,
)
from cairn.pipeline.lab.train.settings import PretrainConfig
from cairn.pipeline.model.folders.checkpoint import read_checkpoint

from tests.lab.train.families import tiny_new
from tests.m3bert_reference import states_by_layer

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
    terms = OBJECTIVES["mlm"](model, heads, part, config)
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
    found = OBJECTIVES["retromae"](model, heads, part, config)
    states = model.read_alone(part.hidden.rows)[1]
    ends = np.cumsum(part.plain.rows.lengths_B)
    losses: list[torch.Tensor] = []
    for row, (start, end) in enumerate(zip(ends - part.plain.rows.lengths_B, ends, strict=True)):
        is_text = part.plain.is_text_N[start:end]
        landmarks = [place for place in range(1, end - start) if not is_text[place]]
        sentence = torch.stack([states[start + place] for place in landmarks]).mean(0)
        words = torch.from_numpy(part.plain.rows.ids_N[start:end][is_text].astype(np.int64))
        seen = sampled_visibility(len(words), 0.5, _generator(0, part.step, row))
        rebuilt = decoder(sentence[None], model.token_table[words], [len(words)], [seen])
        losses.append(F.cross_entropy(rebuilt @ model.token_table.T, words, reduction="sum"))
    assert found["decoder"].item() == pytest.approx(
        torch.stack(losses).sum().item() / part.num_words, rel=1e-5
    )
    assert found["mlm"].item() == pytest.approx(OBJECTIVES["mlm"](model, heads, part, config)["mlm"].item())


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
    OBJECTIVES["retromae"](model, heads, part, config)["decoder"].backward()
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
    before = OBJECTIVES["retromae"](model, heads, part, config)["decoder"].item()
    real = model.states
    moved = copy.copy(part.plain.rows.lengths_B)

    def with_other_ends(*arguments: Any, **named: Any) -> dict[int, torch.Tensor]:
        states = {layer: x.clone() for layer, x in real(*arguments, **named).items()}
        states[model.num_layers][np.cumsum(moved) - 1] += 5.0
        return states

    model.states = with_other_ends  # type: ignore[method-assign]
    assert OBJECTIVES["retromae"](model, heads, part, config)["decoder"].item() == before
