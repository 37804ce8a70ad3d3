"""Separate attention against torch's fused one, and the conversion of models and of weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError
from trainers.models.attention import SeparateAttention, fused_state_dict, separate_attention
from trainers.torchvision_import import ensure_torchvision_import

DIM, HEADS, RECORDS, QUERIES, KEYS = 12, 3, 4, 5, 7
TOLERANCE = 1e-5


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _fused(**options: object) -> nn.Sequential:
    """A model that holds fused attention with random weights, biases included."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        options = {"batch_first": True} | options
        model = nn.Sequential(nn.MultiheadAttention(DIM, HEADS, **options))  # type: ignore[arg-type]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) / DIM**0.5)
    return model


def _both(**options: object) -> tuple[nn.Module, nn.Module]:
    """The same attention, fused and separate."""
    fused, separate = _fused(**options), _fused(**options)
    assert separate_attention(separate) == 1
    return fused[0], separate[0]


def _close(actual: Tensor | None, expected: Tensor | None) -> bool:
    if actual is None or expected is None:
        return actual is expected
    return actual.shape == expected.shape and torch.allclose(actual, expected, rtol=0, atol=TOLERANCE)


HIDDEN = _random(QUERIES, KEYS, seed=5) > 0.8
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "boolean": {"attn_mask": HIDDEN},
    "floating": {"attn_mask": _random(QUERIES, KEYS, seed=6)},
    "per head": {"attn_mask": _random(RECORDS * HEADS, QUERIES, KEYS, seed=7)},
}


@pytest.mark.parametrize("mask", MASKS)
def test_cross_attention_equals_fused(mask: str) -> None:
    fused, separate = _both(kdim=6, vdim=8)
    shapes = ((QUERIES, DIM), (KEYS, 6), (KEYS, 8))
    inputs = [_random(RECORDS, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    expected = fused(*inputs, need_weights=False, **MASKS[mask])
    actual = separate(*inputs, need_weights=False, **MASKS[mask])
    assert _close(actual[0], expected[0])
    assert actual[1] is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_self_attention_equals_fused(bias: bool, training: bool) -> None:
    fused, separate = _both(bias=bias)
    tokens = _random(RECORDS, QUERIES, DIM)
    with torch.no_grad():  # in evaluation mode this is torch's own fast path
        expected = fused.train(training)(tokens, tokens, tokens, need_weights=False)
        actual = separate.train(training)(tokens, tokens, tokens, need_weights=False)
    assert _close(actual[0], expected[0])
    assert actual[1] is None


def test_gradients_are_slices_of_the_fused_ones() -> None:
    fused, separate = _both()
    tokens = _random(RECORDS, QUERIES, DIM)
    for attention in (fused, separate):
        (
            attention(tokens, tokens, tokens, need_weights=False)[0] * _random(QUERIES, DIM, seed=3)
        ).sum().backward()
    parts = [separate.get_submodule(name).weight.grad for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.allclose(torch.cat(parts), fused.in_proj_weight.grad, rtol=1e-4, atol=1e-4)


def test_every_projection_sees_records_on_the_leading_axis() -> None:
    _, separate = _both()
    seen = []
    for layer in separate.children():
        layer.register_forward_hook(lambda _, inputs, output: seen.append((len(inputs[0]), len(output))))
    query, key = _random(RECORDS, QUERIES, DIM), _random(RECORDS, KEYS, DIM)
    separate(query, key, key)
    assert seen == [(RECORDS, RECORDS)] * 4


def test_changing_one_record_moves_no_other() -> None:
    _, separate = _both()
    query, key = _random(RECORDS, QUERIES, DIM), _random(RECORDS, KEYS, DIM, seed=1)
    changed_query, changed_key = query.clone(), key.clone()
    changed_query[1] += 1
    changed_key[1] += 1
    before = separate(query, key, key, attn_mask=HIDDEN)[0]
    after = separate(changed_query, changed_key, changed_key, attn_mask=HIDDEN)[0]
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.allclose(before[1], after[1])


def test_empty_batch_gives_empty_output() -> None:
    _, separate = _both()
    empty = torch.zeros(0, QUERIES, DIM)
    assert separate(empty, empty, empty, need_weights=False)[0].shape == (0, QUERIES, DIM)


@pytest.mark.parametrize("options", [{}, {"kdim": 6}, {"bias": False}])
def test_round_trip_is_bit_equal(options: dict[str, object]) -> None:
    model = _fused(**options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert separate_attention(model) == 1
    after = fused_state_dict(model)
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_conversion_copies_the_weights() -> None:
    model = _fused()
    original = model[0]
    separate_attention(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert original.in_proj_weight.any()
    assert original.out_proj.weight.any()


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"])
def test_requires_grad_flags_are_kept(name: str) -> None:
    model = _fused()
    model[0].get_parameter(name).requires_grad_(False)
    separate_attention(model)
    frozen = {n for n, p in model[0].named_parameters() if not p.requires_grad}
    kind = name.rpartition(".")[2].rpartition("_")[2]
    parts = ("q_proj", "k_proj", "v_proj") if name.startswith("in_proj") else ("out_proj",)
    assert frozen == {f"{part}.{kind}" for part in parts}


@pytest.mark.parametrize("training", [False, True])
def test_training_mode_is_kept(training: bool) -> None:
    model = _fused().train(training)
    separate_attention(model)
    assert all(module.training == training for module in model.modules())


def test_conversion_leaves_the_random_state_alone() -> None:
    model, state = _fused(), torch.get_rng_state()
    separate_attention(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_initial_weights_follow_the_law_of_the_fused_ones() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        separate, fused = SeparateAttention(64, 4), nn.MultiheadAttention(64, 4)
    bound = float(fused.in_proj_weight.detach().abs().max())
    for layer in (separate.q_proj, separate.k_proj, separate.v_proj):
        assert float(layer.weight.detach().abs().max()) == pytest.approx(bound, rel=0.01)
        assert not layer.bias.any()


class _OwnAttention(nn.MultiheadAttention):
    pass


def _adapted() -> nn.Module:
    model = _fused()
    model[0].out_proj = nn.Sequential(model[0].out_proj)
    return model


@pytest.mark.parametrize(
    "build",
    [
        lambda: _fused(add_bias_kv=True),
        lambda: _fused(add_zero_attn=True),
        lambda: _fused(dropout=0.1),
        lambda: _fused(batch_first=False),
        lambda: nn.Sequential(_OwnAttention(DIM, HEADS, batch_first=True)),
        lambda: nn.MultiheadAttention(DIM, HEADS, batch_first=True),
        _adapted,
    ],
)
def test_separating_refuses_what_is_not_exact(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match="cannot be converted exactly"):
        separate_attention(build())


def test_refusal_converts_nothing() -> None:
    model = nn.Sequential(_fused()[0], _fused(dropout=0.1)[0])
    with pytest.raises(ConfigError, match="dropout"):
        separate_attention(model)
    assert all(type(module) is nn.MultiheadAttention for module in model)


def test_weights_are_refused() -> None:
    tokens = torch.zeros(1, QUERIES, DIM)
    with pytest.raises(ConfigError, match="need_weights=False"):
        SeparateAttention(DIM, HEADS)(tokens, tokens, tokens, need_weights=True)


def test_number_of_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigError, match="num_heads must divide embed_dim"):
        SeparateAttention(10, 3)


@pytest.mark.ci
def test_both_towers_of_clip_keep_their_outputs() -> None:
    ensure_torchvision_import()
    import open_clip

    with torch.random.fork_rng():
        torch.manual_seed(0)
        clip = open_clip.CLIP(
            embed_dim=8,
            vision_cfg={"image_size": 16, "patch_size": 8, "width": 16, "head_width": 8, "layers": 2},
            text_cfg={"context_length": 9, "vocab_size": 20, "width": 16, "heads": 2, "layers": 2},
        ).eval()
    before = {name: value.clone() for name, value in clip.state_dict().items()}
    images = _random(3, 3, 16, 16)
    tokens = torch.randint(1, 19, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = clip.encode_image(images), clip.encode_text(tokens)
        assert separate_attention(clip) == 4
        assert _close(clip.encode_image(images), expected[0])
        assert _close(clip.encode_text(tokens), expected[1])
    after = fused_state_dict(clip)
    assert set(after) == set(before)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
