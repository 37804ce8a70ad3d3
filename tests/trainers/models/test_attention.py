"""Separate attention against torch's fused one, and the conversion of models both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dpgcl_core.errors import ConfigError
from trainers.models.attention import SeparateAttention, fuse_attention, separate_attention
from trainers.torchvision_import import ensure_torchvision_import

DIM, HEADS, RECORDS, QUERIES, KEYS = 12, 3, 4, 5, 7
TOLERANCE = 1e-5


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _fused(**options: object) -> nn.Sequential:
    """A model that holds fused attention with random weights, biases included."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
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
PADDING = torch.arange(KEYS) >= torch.tensor([[7], [5], [6], [3]])
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "boolean": {"attn_mask": HIDDEN},
    "floating": {"attn_mask": _random(QUERIES, KEYS, seed=6)},
    "per head": {"attn_mask": _random(RECORDS * HEADS, QUERIES, KEYS, seed=7)},
    "padding": {"key_padding_mask": PADDING},
    "floating padding": {"key_padding_mask": _random(RECORDS, KEYS, seed=8)},
    "both": {"attn_mask": HIDDEN, "key_padding_mask": PADDING},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_cross_attention_equals_fused(mask: str, need_weights: bool, batch_first: bool) -> None:
    fused, separate = _both(batch_first=batch_first, kdim=6, vdim=8)
    inputs = [
        _random(RECORDS, *shape, seed=seed)
        for seed, shape in enumerate(((QUERIES, DIM), (KEYS, 6), (KEYS, 8)))
    ]
    if not batch_first:
        inputs = [x.transpose(0, 1) for x in inputs]
    expected = fused(*inputs, need_weights=need_weights, **MASKS[mask])
    actual = separate(*inputs, need_weights=need_weights, **MASKS[mask])
    assert _close(actual[0], expected[0])
    assert _close(actual[1], expected[1])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_self_attention_equals_fused(bias: bool, training: bool) -> None:
    fused, separate = _both(batch_first=True, bias=bias)
    tokens = _random(RECORDS, QUERIES, DIM)
    with torch.no_grad():  # in evaluation mode this is torch's own fast path
        expected = fused.train(training)(tokens, tokens, tokens, need_weights=False)
        actual = separate.train(training)(tokens, tokens, tokens, need_weights=False)
    assert _close(actual[0], expected[0])
    assert actual[1] is None


def test_weights_per_head_equal_fused() -> None:
    fused, separate = _both(batch_first=True)
    tokens = _random(RECORDS, QUERIES, DIM)
    expected = fused(tokens, tokens, tokens, average_attn_weights=False)[1]
    assert _close(separate(tokens, tokens, tokens, average_attn_weights=False)[1], expected)


@pytest.mark.parametrize("batch_first", [False, True])
def test_single_record_without_batch_axis_equals_fused(batch_first: bool) -> None:
    fused, separate = _both(batch_first=batch_first)
    query, key = _random(QUERIES, DIM), _random(KEYS, DIM, seed=1)
    expected = fused(query, key, key, key_padding_mask=PADDING[1])
    actual = separate(query, key, key, key_padding_mask=PADDING[1])
    assert _close(actual[0], expected[0])
    assert _close(actual[1], expected[1])


def test_causal_remark_with_mask_equals_fused() -> None:
    fused, separate = _both(batch_first=True)
    tokens = _random(RECORDS, QUERIES, DIM)
    mask = torch.ones(QUERIES, QUERIES).triu(1).bool()
    options = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    assert _close(separate(tokens, tokens, tokens, **options)[0], fused(tokens, tokens, tokens, **options)[0])


def test_gradients_are_slices_of_the_fused_ones() -> None:
    fused, separate = _both(batch_first=True)
    tokens = _random(RECORDS, QUERIES, DIM)
    for attention in (fused, separate):
        (
            attention(tokens, tokens, tokens, need_weights=False)[0] * _random(QUERIES, DIM, seed=3)
        ).sum().backward()
    parts = [separate.get_submodule(name).weight.grad for name in ("q_proj", "k_proj", "v_proj")]
    assert torch.allclose(torch.cat(parts), fused.in_proj_weight.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch_first", [False, True])
def test_every_projection_sees_records_on_the_leading_axis(batch_first: bool) -> None:
    _, separate = _both(batch_first=batch_first)
    seen = []
    for layer in separate.children():
        layer.register_forward_hook(lambda _, inputs, output: seen.append((len(inputs[0]), len(output))))
    query, key = _random(QUERIES, RECORDS, DIM), _random(KEYS, RECORDS, DIM)
    if batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    separate(query, key, key)
    assert seen == [(RECORDS, RECORDS)] * 4


@pytest.mark.parametrize("need_weights", [False, True])
def test_changing_one_record_moves_no_other(need_weights: bool) -> None:
    _, separate = _both(batch_first=True)
    query, key = _random(RECORDS, QUERIES, DIM), _random(RECORDS, KEYS, DIM, seed=1)
    changed_query, changed_key = query.clone(), key.clone()
    changed_query[1] += 1
    changed_key[1] += 1
    before = separate(query, key, key, PADDING, need_weights)[0]
    after = separate(changed_query, changed_key, changed_key, PADDING, need_weights)[0]
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
    assert not torch.allclose(before[1], after[1])


def test_empty_batch_gives_empty_output() -> None:
    _, separate = _both(batch_first=True)
    empty = torch.zeros(0, QUERIES, DIM)
    assert separate(empty, empty, empty, need_weights=False)[0].shape == (0, QUERIES, DIM)


@pytest.mark.parametrize("options", [{}, {"kdim": 6}, {"bias": False, "batch_first": True}])
def test_round_trip_is_bit_equal(options: dict[str, object]) -> None:
    model = _fused(**options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert separate_attention(model) == 1
    assert fuse_attention(model) == 1
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert model[0].batch_first == options.get("batch_first", False)


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
    fuse_attention(model)
    assert {n for n, p in model[0].named_parameters() if not p.requires_grad} == {name}


@pytest.mark.parametrize("training", [False, True])
def test_training_mode_is_kept(training: bool) -> None:
    model = _fused().train(training)
    separate_attention(model)
    assert all(module.training == training for module in model.modules())
    fuse_attention(model)
    assert all(module.training == training for module in model.modules())


def test_module_used_twice_stays_one() -> None:
    shared = nn.MultiheadAttention(DIM, HEADS)
    model = nn.ModuleList([shared, nn.ModuleList([shared])])
    assert separate_attention(model) == 1
    assert model[0] is model[1][0]
    assert isinstance(model[0], SeparateAttention)


def test_conversion_leaves_the_random_state_alone() -> None:
    model, state = _fused(), torch.get_rng_state()
    separate_attention(model)
    fuse_attention(model)
    assert torch.equal(torch.get_rng_state(), state)


def test_initial_weights_follow_the_law_of_the_fused_ones() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        separate, fused = SeparateAttention(64, 4), nn.MultiheadAttention(64, 4)
    bound = float(fused.in_proj_weight.detach().abs().max())
    for layer in (separate.q_proj, separate.k_proj, separate.v_proj):
        assert float(layer.weight.detach().abs().max()) == pytest.approx(bound, rel=0.01)
        assert not layer.bias.any()


@pytest.mark.parametrize("training", [False, True])
def test_transformer_layer_of_torch_takes_it(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, dropout=0.0, batch_first=True).train(training)
    tokens = _random(RECORDS, QUERIES, DIM)
    with torch.no_grad():
        expected = layer(tokens)
        assert separate_attention(layer) == 1
        assert _close(layer(tokens), expected)


class _OwnAttention(nn.MultiheadAttention):
    pass


def _shared_parameter() -> nn.Module:
    model = nn.Sequential(nn.MultiheadAttention(DIM, HEADS), nn.Linear(DIM, DIM))
    model[1].weight = model[0].out_proj.weight
    return model


def _hooked() -> nn.Module:
    model = _fused()
    model[0].register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: _fused(add_bias_kv=True), "'0' .*add_bias_kv"),
        (lambda: _fused(add_zero_attn=True), "'0' .*add_zero_attn"),
        (lambda: _fused(dropout=0.1), "'0' .* dropout 0.1"),
        (lambda: nn.Sequential(_OwnAttention(DIM, HEADS)), "'0' is a _OwnAttention"),
        (lambda: nn.MultiheadAttention(DIM, HEADS), "pass the module that contains it"),
        (_shared_parameter, "'0' shares a parameter"),
        (_hooked, "'0' has hooks"),
    ],
)
def test_separating_refuses_what_is_not_exact(build: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        separate_attention(build())


def _separate(change: Callable[[SeparateAttention], None]) -> nn.Module:
    attention = SeparateAttention(DIM, HEADS)
    change(attention)
    return nn.Sequential(attention)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: a.q_proj.weight.requires_grad_(False), "only some are trainable"),
        (lambda a: a.v_proj.bias.requires_grad_(False), "only some are trainable"),
        (lambda a: setattr(a.k_proj, "bias", None), "some projections have a bias"),
        (lambda a: setattr(a, "q_proj", nn.Sequential(a.q_proj)), "q_proj is a Sequential"),
    ],
)
def test_fusing_refuses_what_is_not_exact(change: Callable[[SeparateAttention], None], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        fuse_attention(_separate(change))


def test_refusal_converts_nothing() -> None:
    model = nn.Sequential(_fused()[0], _fused(dropout=0.1)[0])
    with pytest.raises(ConfigError, match="dropout"):
        separate_attention(model)
    assert all(type(module) is nn.MultiheadAttention for module in model)


def test_causal_remark_without_mask_is_refused() -> None:
    tokens = torch.zeros(1, QUERIES, DIM)
    with pytest.raises(ConfigError, match="attn_mask"):
        SeparateAttention(DIM, HEADS)(tokens, tokens, tokens, is_causal=True)


def test_integer_mask_is_refused() -> None:
    tokens = torch.zeros(RECORDS, QUERIES, DIM)
    with pytest.raises(ConfigError, match="boolean or floating"):
        SeparateAttention(DIM, HEADS, batch_first=True)(
            tokens, tokens, tokens, attn_mask=torch.zeros(QUERIES, QUERIES, dtype=torch.long)
        )


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
    assert fuse_attention(clip) == 4
    assert all(torch.equal(value, before[name]) for name, value in clip.state_dict().items())
