"""The linear probe: logistic regression on standardised features, solved to its optimum.

The protocol follows Kornblith et al. (2019, section 3) and Radford et al. (2021, appendix A.3): multinomial
logistic regression on the frozen features of the whole training set, by L-BFGS. With W
`[num_classes, feature_dim]` and b `[num_classes]`, the probe is the minimum of

    F(W, b) = Σ_i −log softmax(W x_i + b)_{y_i} + ½ n λ ‖W‖²

over all n records i, with x standardised by the training features' own mean and deviation. These authors
choose λ for every network on validation records. Here λ is a constant, so that no score needs a choice. F is
convex and has one minimum, whatever the order of the records. The same features always give the same bits.

Features of networks are nearly collinear, and plain L-BFGS then stops far from the minimum. So it runs on
V = W L instead. For K classes, L Lᵀ = XᵀX/K + n λ I is the curvature of F at W = 0, which bounds the
curvature everywhere up to a factor of K/2 (Böhning, 1992). L is one Cholesky factor of a
`[feature_dim, feature_dim]` matrix. Time and memory are in benchmarks/results/scoring-2026-11-22.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor

Features = NDArray[np.float32]
Labels = NDArray[np.int64]

PENALTY = 3e-4
"""λ. Of 1e-4, 3e-4, 1e-3 and 3e-3 the best for an untrained CNN on 10,000 training records of Fashion-MNIST,
and within a point of the best for raw pixels and HOG there; scikit-learn's C = 1 at 3,333 records."""
MAX_ITERATIONS = 1000
GRADIENT_TOLERANCE = 1e-4
"""Largest entry of the gradient when the fit stops, over √n: F/n was then at most 1e-4 above its minimum."""


def standardization_of(features: Features) -> Callable[[Features], Tensor]:
    """Return the standardization by the mean and deviation of these features `[n, feature_dim]`.

    The function returned subtracts the mean and divides by the standard deviation, or by 1 for a constant
    feature, whose standardised value is 0. Its result is float32, of the shape of its argument.
    """
    mean, variance = features.mean(axis=0, dtype=np.float64), features.var(axis=0, dtype=np.float64)
    # The computed deviation of a constant feature is only rounding error: at most n·eps times its mean.
    rounding = len(features) * np.finfo(np.float64).eps
    is_constant = variance <= rounding * variance + (rounding * mean) ** 2
    deviation = np.where(is_constant, 1.0, np.sqrt(variance))
    centre, scale = mean.astype(np.float32), deviation.astype(np.float32)

    def standardise(rows: Features) -> Tensor:
        standard: Features = rows - centre
        standard /= scale
        return torch.from_numpy(standard)

    return standardise


@dataclass(frozen=True, kw_only=True)
class LinearProbe:
    """A fitted probe.

    Attributes:
      classes: `[num_classes]`, the labels, ascending.
      scaler: the standardization by the training features.
      weight: W, float32 `[num_classes, feature_dim]`, for standardised features.
      bias: b, float32 `[num_classes]`.
      num_iterations: the number of iterations of L-BFGS.
    """

    classes: Labels
    scaler: Callable[[Features], Tensor]
    weight: Tensor
    bias: Tensor
    num_iterations: int

    def logits(self, features: Features) -> Tensor:
        """Return the logits `[n, num_classes]` of features `[n, feature_dim]`, for each row independently."""
        return self.scaler(features) @ self.weight.T + self.bias

    def predict(self, features: Features) -> Labels:
        """Return the label of each row of features `[n, feature_dim]`; ties go to the smallest label."""
        found: Labels = self.classes[self.logits(features).argmax(dim=1).numpy()]
        return found


def fit_linear_probe(features: Features, labels: Labels) -> LinearProbe:
    """Fit a linear probe to convergence, at most `MAX_ITERATIONS`; the features have at least two classes.

    Args:
      features: finite features `[n, feature_dim]`; one standardised copy of them is in memory during the fit.
      labels: `[n]`.
    """
    classes, class_of_row = np.unique(labels, return_inverse=True)
    scaler = standardization_of(features)
    problem = _ProbeLoss(scaler(features), torch.from_numpy(class_of_row), len(classes))
    optimum = minimize(
        problem.loss_and_gradient,
        np.zeros(len(classes) * (features.shape[1] + 1)),
        jac=True,
        method="L-BFGS-B",
        options={
            "maxiter": MAX_ITERATIONS,
            "maxcor": 20,  # pairs of steps and gradients that L-BFGS keeps
            "gtol": GRADIENT_TOLERANCE * len(features) ** 0.5,
            "ftol": 0.0,
        },
    )
    weight, bias = problem.weights(optimum.x)
    return LinearProbe(
        classes=classes, scaler=scaler, weight=weight, bias=bias, num_iterations=int(optimum.nit)
    )


class _ProbeLoss:
    """The probe's loss F on one training set, as a function of V and b in one flat float64 array."""

    def __init__(self, rows: Tensor, class_of_row: Tensor, num_classes: int) -> None:
        self._rows, self._class_of_row, self._num_classes = rows, class_of_row, num_classes
        self._penalty = PENALTY * len(rows)
        curvature = (rows.T @ rows).double() / num_classes
        penalty = self._penalty * torch.eye(len(curvature), dtype=torch.float64)
        self._factor = torch.linalg.cholesky(curvature + penalty)
        # Böhning: the curvature at zero with respect to the bias is n/K.
        self._bias_scale = (len(rows) / num_classes) ** -0.5

    def weights(self, point: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        """Return W and b in float32 at a point (V, b)."""
        weight, bias = self._split(point)
        return weight.float(), bias.float()

    def loss_and_gradient(self, point: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Return F at a point (V, b), and its gradient."""
        weight, bias = self._split(point)
        logits = torch.addmm(bias.float(), self._rows, weight.float().T)
        log_probs = logits.log_softmax(dim=1)
        own = self._class_of_row[:, None]
        loss = -log_probs.gather(1, own).double().sum() + 0.5 * self._penalty * weight.square().sum()
        residuals = log_probs.exp_().scatter_add_(1, own, torch.full_like(own, -1.0, dtype=torch.float32))
        along_weight = (residuals.T @ self._rows).double() + self._penalty * weight
        along_v = torch.linalg.solve_triangular(self._factor, along_weight.T, upper=False).T
        along_bias = residuals.sum(dim=0, dtype=torch.float64) * self._bias_scale
        return float(loss), torch.cat([along_v.flatten(), along_bias]).numpy()

    def _split(self, point: NDArray[np.float64]) -> tuple[Tensor, Tensor]:
        """Return W = V L⁻¹ and the unscaled b, in float64."""
        flat: Any = torch.from_numpy(np.asarray(point, dtype=np.float64))
        v = flat[: -self._num_classes].view(self._num_classes, -1)
        weight = torch.linalg.solve_triangular(self._factor.T, v.T, upper=True).T
        return weight, flat[-self._num_classes :] * self._bias_scale
