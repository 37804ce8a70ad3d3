"""Products over rows are the same in either library, and taken by the faster one where it is known to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dpgcl_core.clipping import products

SHAPES = [(1024, 96, 200), (3000, 128, 64), (65_536, 16, 17)]
"""Rows, m and n: large products."""


@pytest.fixture(params=[True, False], ids=["avx512", "without avx512"])
def _processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_avx512", lambda: request.param)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What oneDNN was given, on a processor that is said to have AVX-512."""
    found: list[str] = []
    right = products._by_onednn()

    def counted(left: Tensor, other: Tensor) -> Tensor:
        found.append("onednn")
        return left.T @ other if right is None else right(left, other)

    monkeypatch.setattr(products, "has_avx512", lambda: True)
    monkeypatch.setattr(products, "_by_onednn", lambda: counted)
    return found


def _matrices(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "m", "n"), SHAPES)
@pytest.mark.usefixtures("_processor")
def test_product_is_exact_on_every_processor(rows: int, m: int, n: int) -> None:
    left, right = _matrices(rows, m), _matrices(rows, n)
    expected = left.double().T @ right.double()
    error = (products.products_over_rows(left[None], right[None])[0] - expected).norm() / expected.norm()
    assert error < 1e-5


@pytest.mark.usefixtures("_processor")
def test_products_of_groups_are_exact_on_every_processor() -> None:
    left, right = _matrices(3, 1024, 96), _matrices(3, 1024, 200)
    expected = left.double().transpose(1, 2) @ right.double()
    actual = products.products_over_rows(left, right)
    assert actual.shape == expected.shape
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.usefixtures("_processor")
def test_products_of_strided_operands_are_exact() -> None:
    """Weight gradients have operands that are slices and transposes."""
    left, right = _matrices(2048, 300)[:, 100:196], _matrices(200, 2048).T
    expected = left.double().T @ right.double()
    error = (products.products_over_rows(left[None], right[None])[0] - expected).norm() / expected.norm()
    assert error < 1e-5


@pytest.mark.parametrize("threads", [1, 2])
def test_large_products_go_to_onednn_and_small_ones_do_not(
    threads: int, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = 153 * threads**2
    products.products_over_rows(_matrices(1, rows, 128), _matrices(1, rows, 128))
    assert taken == ["onednn"]
    products.products_over_rows(_matrices(1, rows - 8, 128), _matrices(1, rows - 8, 128))
    products.products_over_rows(_matrices(8, 100, 128), _matrices(8, 100, 128))  # each by itself is small
    assert taken == ["onednn"]


@pytest.mark.usefixtures("_processor")
def test_products_of_groups_are_written_where_they_are_wanted() -> None:
    left, right = _matrices(3, 1024, 96), _matrices(3, 1024, 200)
    all_of_them = torch.full((5, 96, 200), -1.0)
    actual = products.products_over_rows(left, right, out=all_of_them[1:4])
    assert torch.equal(actual, products.products_over_rows(left, right))
    assert torch.equal(all_of_them[1:4], actual)
    assert (all_of_them[[0, 4]] == -1).all()


@pytest.mark.parametrize(("name", "value"), [("has_avx512", lambda: False), ("_by_onednn", lambda: None)])
def test_without_avx512_or_the_operator_torch_multiplies(
    name: str, value: Callable[[], object], taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, name, value)
    left, right = _matrices(1024, 128), _matrices(1024, 128)
    assert torch.equal(products.products_over_rows(left[None], right[None])[0], left.T @ right)
    assert not taken


@pytest.mark.usefixtures("_processor")
def test_products_of_operands_whose_rows_share_memory_are_exact() -> None:
    """As of a Linear layer over `unfold`."""
    left, right = torch.randn(1100, 1)[:, 0].unfold(0, 77, 1)[:1024], _matrices(1024, 300)
    expected = left.double().T @ right.double()
    error = (products.products_over_rows(left[None], right[None])[0] - expected).norm() / expected.norm()
    assert error < 1e-5


def test_an_operator_of_less_precision_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class InBfloat16:
        @staticmethod
        def _linear_pointwise(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
            return (x.bfloat16() @ weight.bfloat16().T).float()

    monkeypatch.setattr(torch.ops, "mkldnn", InBfloat16)
    products._by_onednn.cache_clear()
    try:
        assert products._by_onednn() is None
    finally:
        products._by_onednn.cache_clear()


def test_an_operator_that_is_not_as_it_was_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others:
        @staticmethod
        def _linear_pointwise(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
            return x @ weight.T + 1

    monkeypatch.setattr(torch.ops, "mkldnn", Others)
    products._by_onednn.cache_clear()
    try:
        assert products._by_onednn() is None
    finally:
        products._by_onednn.cache_clear()
