"""Masked auto-encoders: patches, what is hidden of them, sizes, and what is refused."""

from __future__ import annotations

import pytest
import torch

from dpgcl_core.clipping.types import num_trainable
from dpgcl_core.errors import ConfigError
from trainers.config.networks import MaskedNetworkConfig
from trainers.models.masked import SIZES, MaskedAutoEncoder, Size, build_masked

SMALL = Size(depth=1, width=16, decoder_depth=1, decoder_width=8)


def small(patch_size: int = 2, mask_ratio: float = 0.5, *, recomputes: bool = False) -> MaskedAutoEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = MaskedNetworkConfig(
            patch_size=patch_size, mask_ratio=mask_ratio, gradient_checkpointing=recomputes
        )
        return MaskedAutoEncoder(config, SMALL, (3, 4, 6))


def orders_of(num_images: int, num_patches: int, seed: int = 0) -> torch.Tensor:
    noise = torch.rand(num_images, num_patches, generator=torch.Generator().manual_seed(seed))
    return noise.argsort(1)


def test_patches_are_the_images_cells_row_by_row() -> None:
    images = torch.randn(2, 3, 4, 6)
    patches = small().patches(images)
    assert patches.shape == (2, 6, 12)
    for row in range(2):
        for column in range(3):
            cell = images[:, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            assert torch.equal(patches[:, 3 * row + column], cell.flatten(1))


def test_targets_are_the_hidden_patches_with_mean_0_and_variance_1() -> None:
    network, images, orders = small(), 5 + 3 * torch.randn(2, 3, 4, 6), orders_of(2, 6)
    targets, patches = network.targets(images, orders), network.patches(images)
    assert targets.shape == (2, 3, 12)
    for image in range(2):
        for place, patch in enumerate(orders[image, 3:]):
            expected = patches[image, patch]
            expected = (expected - expected.mean()) / (expected.var() + 1e-6).sqrt()
            assert torch.allclose(targets[image, place], expected, atol=1e-5)


def test_hidden_patches_do_not_reach_what_is_made_of_them() -> None:
    network, images, orders = small(), torch.randn(2, 3, 4, 6), orders_of(2, 6)
    rebuilt = network(images, orders)
    assert rebuilt.shape == (2, 3, 12)
    others = images.clone()
    for image in range(2):
        for patch in orders[image, 3:].tolist():
            row, column = divmod(patch, 3)
            others[image, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 9.0
    assert torch.equal(network(others, orders), rebuilt)
    shown = images.clone()
    row, column = divmod(int(orders[0, 0]), 3)
    shown[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 9.0
    moved = (network(shown, orders) - rebuilt).abs().amax((1, 2))
    assert float(moved[0]) > 1e-3
    assert float(moved[1]) == 0.0


def test_every_patch_is_rebuilt_at_its_place() -> None:
    """The order of the hidden ones is only the order in which they are answered."""
    network, images = small(), torch.randn(1, 3, 4, 6)
    first = network(images, torch.tensor([[0, 1, 2, 3, 4, 5]]))
    other = network(images, torch.tensor([[2, 0, 1, 5, 3, 4]]))
    assert torch.allclose(first[:, [2, 0, 1]], other, atol=1e-5)


def test_features_are_of_all_patches_whatever_is_hidden() -> None:
    images = torch.randn(2, 3, 4, 6)
    network = small()
    assert network.features(images).shape == (2, network.feature_dim) == (2, 16)
    for patch in range(6):
        row, column = divmod(patch, 3)
        others = images.clone()
        others[0, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] += 1.0
        moved = (network.features(others) - network.features(images)).abs().amax(1)
        assert float(moved[0]) > 1e-4
        assert float(moved[1]) < 1e-6


def test_recomputed_activations_give_the_same_gradients() -> None:
    images, orders = torch.randn(2, 3, 4, 6), orders_of(2, 6)
    found = []
    for recomputes in (False, True):
        network = small(recomputes=recomputes)
        network(images, orders).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "millions"), [("mae-nano", 18.6), ("mae-tiny", 34.8), ("mae-small", 61.6), ("mae-base", 99.0)]
)
@pytest.mark.ci
def test_published_sizes_have_the_published_numbers_of_weights(name: str, millions: float) -> None:
    """ViP, table 4; its last row says 233.3 million of an encoder that alone has 303 million."""
    with torch.device("meta"):
        network = MaskedAutoEncoder(MaskedNetworkConfig(), SIZES[name], (3, 224, 224))
    assert round(num_trainable(network) / 1e6, 1) == millions


def test_the_same_seed_builds_the_same_network_and_leaves_the_global_state() -> None:
    config, state = MaskedNetworkConfig(patch_size=2), torch.get_rng_state()
    first, again, other = (build_masked(config, (1, 8, 8), seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("patch_size", [3, 5, 8])
def test_patch_size_that_does_not_divide_the_image_is_refused(patch_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"must divide the image, 4 × 6 pixels; got {patch_size}. Change"):
        small(patch_size)


@pytest.mark.parametrize("ratio", [0.05, 0.95])
def test_mask_that_hides_no_patch_or_all_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"at least one patch but not all; got .*, which hides \d of 6"):
        small(mask_ratio=ratio)


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.5, float("nan")])
def test_mask_ratio_outside_0_and_1_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match=r"mask_ratio must be in \(0, 1\); got"):
        MaskedNetworkConfig(mask_ratio=ratio)


def test_unknown_network_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"network of dp_mae.*mae-base.*mae-toy"):
        build_masked(MaskedNetworkConfig(name="tiny_cnn"), (1, 8, 8), 0)
