"""Captioners: what a token may look at, padding, likelihoods, generated captions, sizes, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from trainers.config.networks import CaptionerConfig
from trainers.data.shapes import make_shape_pairs
from trainers.models.captioner import SIZES, Captioner, Size, build_captioner

SMALL = Size(depth=1, width=16, decoder_depth=2, decoder_width=8, patch_size=2, vocabulary=514, max_tokens=12)
SHAPE = (3, 4, 6)


def small(*, tie_embeddings: bool = False, recomputes: bool = False) -> Captioner:
    """At weights that make every part matter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CaptionerConfig(tie_embeddings=tie_embeddings, gradient_checkpointing=recomputes)
        network = Captioner(config, SMALL, SHAPE)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return network


def inputs_of(network: Captioner) -> tuple[Tensor, Tensor]:
    images = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(1))
    return images, network.tokenizer(["a b", "hi there", "x"]).tokens


def test_a_token_is_predicted_from_those_before_it() -> None:
    network = small()
    images, tokens = inputs_of(network)
    logits = network(images, tokens)
    assert logits.shape == (3, 11, 514)
    changed = tokens.clone()
    changed[:, 4] = 7
    moved = (network(images, changed) - logits).detach().abs().amax((0, 2))
    assert float(moved[:4].max()) == 0
    assert bool((moved[4:] > 1e-5).all())


def test_every_patch_reaches_every_token() -> None:
    network = small()
    images, tokens = inputs_of(network)
    logits = network(images, tokens)
    for row in range(2):
        for column in range(3):
            changed = images.clone()
            changed[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += 1.0
            assert bool(((network(changed, tokens) - logits).abs().amax((0, 2)) > 1e-5).all())


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_what_stands_in_the_place_of_padding_moves_neither_loss_nor_gradient(tie_embeddings: bool) -> None:
    network = small(tie_embeddings=tie_embeddings)
    images, tokens = inputs_of(network)
    found = []
    for padding in (0, 99):
        behind = (tokens == network.end_token).cumsum(1).bool() & (tokens != network.end_token)
        padded = tokens.masked_fill(behind, padding)
        loss = -network.next_tokens(network(images, padded), padded).per_token().sum()
        found.append((loss, torch.autograd.grad(loss, list(network.parameters()))))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(one, other) for one, other in zip(found[0][1], found[1][1], strict=True))


def test_likelihoods_are_those_of_the_softmax_token_by_token() -> None:
    network = small()
    images, tokens = inputs_of(network)
    logits = network(images, tokens).detach()
    found = network.next_tokens(logits, tokens)
    for row, length in enumerate((tokens == network.end_token).int().argmax(1).tolist()):
        expected = [logits[row, t].softmax(0)[tokens[row, t + 1]].log() for t in range(length)]
        assert found.counts[row].tolist() == [True] * length + [False] * (11 - length)
        assert torch.allclose(found.log_likelihoods[row, :length], torch.stack(expected), atol=1e-5)
        assert not found.log_likelihoods[row, length:].any()
        assert torch.allclose(found.per_token()[row], torch.stack(expected).mean(), atol=1e-5)


def test_caption_without_room_for_its_end_is_cut_and_ends() -> None:
    network = small()
    tokens = network.tokenizer(["a " * 40]).tokens
    assert tokens.shape == (1, 12)
    assert tokens[0, -1] == network.end_token
    assert bool(network.next_tokens(torch.zeros(1, 11, 514), tokens).counts.all())


def test_features_are_the_mean_of_the_encoders_tokens() -> None:
    network = small()
    images, _ = inputs_of(network)
    assert network.features(images).shape == (3, network.feature_dim) == (3, 16)
    assert torch.equal(network.features(images), network.encode(images).mean(1))


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = small(tie_embeddings=True), small()
    assert tied.predict.weight is tied.embed_tokens.weight
    assert num_trainable(untied) - num_trainable(tied) == 514 * 8


def test_generated_caption_is_the_likeliest_token_after_token() -> None:
    network = small()
    images, _ = inputs_of(network)
    found = network.generate(images)
    for image, text in zip(images, found, strict=True):
        tokens = [network.start_token]
        while len(tokens) < network.max_tokens and tokens[-1] != network.end_token:
            encoded = network.encode(image[None])
            logits = network.decode(encoded, torch.tensor([tokens]))[0, -1].detach()
            logits[network.start_token] = -torch.inf
            tokens.append(int(logits.argmax()))
        assert text == network.tokenizer.text([t for t in tokens[1:] if t != network.end_token])
    assert network.generate(images.flip(0)) == found[::-1]


def test_recomputed_activations_give_the_same_gradients() -> None:
    found = []
    for recomputes in (False, True):
        network = small(recomputes=recomputes)
        images, tokens = inputs_of(network)
        network(images, tokens).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert torch.allclose(*found, atol=1e-4)


def test_tokens_spell_the_caption_and_the_toy_cuts_none_of_the_shapes() -> None:
    network = build_captioner(CaptionerConfig(), (3, 32, 32), seed=0)
    texts, _ = make_shape_pairs(300, seed=0, captions_per_image=4).flat_captions()
    found = network.tokenizer(texts)
    assert found.num_truncated == 0
    assert int(found.tokens.max()) == network.end_token == 1023
    assert bool((found.tokens[:, 0] == network.start_token).all())
    for text, tokens in zip(texts[:20], found.tokens.tolist(), strict=False):
        inside = tokens[1 : tokens.index(network.end_token)]
        assert network.tokenizer.text(inside) == text.lower()


@pytest.mark.parametrize(
    ("name", "millions"), [("cap-tiny", 59), ("cap-small", 115), ("cap-base", 190), ("cap-large", 407)]
)
def test_published_sizes_have_the_published_numbers_of_weights(name: str, millions: float) -> None:
    """DP-Cap, table 6; its vocabulary is of "around 32,000" tokens, ours of 32,000."""
    with torch.device("meta"):
        network = Captioner(CaptionerConfig(), SIZES[name], (3, 224, 224))
    assert abs(num_trainable(network) / 1e6 / millions - 1) < 0.025
    assert network.max_tokens == 40


def test_the_same_seed_builds_the_same_network_and_leaves_the_global_state() -> None:
    config, state = CaptionerConfig(), torch.get_rng_state()
    first, again, other = (build_captioner(config, (3, 32, 32), seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("patch_size", [3, 5])
def test_patch_size_that_does_not_divide_the_image_is_refused(patch_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"must divide the image, 32 × 32 pixels; got {patch_size}\. "):
        build_captioner(CaptionerConfig(patch_size=patch_size), (3, 32, 32), seed=0)


def test_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"network of dp_cap.*cap-base.*cap-toy|cap-toy.*cap-base"):
        build_captioner(CaptionerConfig(name="cap-huge"), (3, 32, 32), seed=0)
