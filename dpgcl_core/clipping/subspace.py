"""Clipping in a public subspace (stages 7 and 8): what a group contributes are k coordinates, not p numbers.

The noise of a private step falls on every weight, and its norm grows as √p. Gradients of one kind of data lie
near a few directions, and public data show which (Yu et al. 2021, "Do not let privacy overbill utility:
gradient embedding perturbation for private learning"; here without their residual, so what lies outside of
the subspace is lost). So let the rows of Q, `[k, p]`, be orthonormal directions, computed of public records
and the released weights. Each group's gradient is replaced by its coordinates c_G = Q ∇L_G before the clip,
the step releases

    r = Σ_G Clip_C(c_G) + N(0, (σΔ)² I_k),

and the optimizer is given Qᵀ r, whose noise has covariance (σΔ)² QᵀQ: that of the projection on the subspace,
of expected squared norm (σΔ)² k in place of (σΔ)² p.

**Proposition.** Sensitivity Δ, event and ε are those of clipping whole gradients, whatever Q is, as long as
it is a function of public data, public randomness and released weights.

*Proof.* Fix the released weights, and with them Q. Clip_C(c_G) is a function of G's own records and has norm
at most C: the norm is taken of the very coordinates that are added. So neighbouring data sets move the sum, a
vector of R^k, by at most the Δ that the method states for vectors of norm C (it nowhere asks how long they
are), and noise of standard deviation σΔ on each of the k coordinates makes the step the Gaussian mechanism of
noise multiplier σ. Qᵀ r is a function of r and Q: post-processing. Steps compose adaptively, for the next Q
is a function of earlier releases. ∎

*Rounding.* Nothing above needs the rows of Q to be orthonormal, so no rounding of them can cost privacy. Were
the whole gradient clipped first and projected then, ‖Q g‖ ≤ ‖g‖ would be needed, and a basis that is off by a
digit would have to be paid for with a smaller C. Orthonormality is for utility: with it Qᵀ gives the
projection, and the noise the same strength in all of its directions. It is computed in float64 (Householder
QR) and rounded to float32 once, so Q Qᵀ differs from I by some 1e-7. The coordinates' norm is taken in
float64 and covered by the clipper's margin; the noise is drawn, added and put on its grid in R^k
(`dpgcl_core.noise.gaussian`).

*Cost.* Every group's whole gradient is computed, for its coordinates need it: layers take no ghost norm, and
as many groups go through a pass as have room for p numbers each. The basis is k·p numbers, its computation
two more times that in float64, and a product of 2kp flops per group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dpgcl_core.clipping.full_precision import full_precision
from dpgcl_core.errors import ConfigError


def leading_directions(gradients: Tensor, num_directions: int) -> Tensor:
    """Return orthonormal directions that span the leading part of some public gradients.

    The rows are the first k right singular vectors of `gradients`, up to a rotation among themselves: the
    subspace of k dimensions that leaves the least of them out (in squares). Where they span less, the rest
    are further orthonormal directions, without a meaning.

    Args:
      gradients: `[num_gradients, num_parameters]`, finite; a row of zeros has no influence.
      num_directions: k, at most both of its lengths.

    Returns:
      float32 `[k, num_parameters]`, orthonormal in float64 before it is rounded.

    Raises:
      ConfigError: there are fewer gradients or parameters than directions.

    >>> basis = leading_directions(torch.tensor([[3.0, 4.0, 0.0], [6.0, 8.0, 0.0]]), 1)
    >>> [round(abs(x), 3) for x in basis[0].tolist()]
    [0.6, 0.8, 0.0]
    """
    num_gradients, num_parameters = gradients.shape
    if not 1 <= num_directions <= min(num_gradients, num_parameters):
        raise ConfigError(
            f"a subspace has at least 1 direction, and at most as many as gradients ({num_gradients}) and "
            f"weights ({num_parameters}); got {num_directions}"
        )
    exact = gradients.double()
    _, mixtures = torch.linalg.eigh(exact @ exact.T)  # eigenvalues rise
    spanning = mixtures[:, -num_directions:].T @ exact
    directions: Tensor = torch.linalg.qr(spanning.T).Q
    return directions.T.float().contiguous()


def lifted(coordinates: Tensor, basis: Tensor) -> Tensor:
    """Return Qᵀ r, the vector of the weights that coordinates on the rows of Q stand for: post-processing.

    Args:
      coordinates: r, float32 `[k]`.
      basis: Q, float32 `[k, num_parameters]`.

    Returns:
      float32 `[num_parameters]`.
    """
    with full_precision(basis.device.type):
        vector: Tensor = basis.T @ coordinates
    return vector
