from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.pretrain import EnhancedDecoder, bottleneck, sampled_visibility

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


def test_bottleneck_is_the_mean_of_the_landmarks_of_each_text():
    states = torch.arange(14.0).view(7, 2)
    found = bottleneck(states, [4, 3], [torch.tensor([1, 3]), torch.tensor([0])])
    assert found.tolist() == [[4.0, 5.0], [8.0, 9.0]]
