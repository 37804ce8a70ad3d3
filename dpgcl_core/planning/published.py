"""Published trainings from their inputs: the ε that each paper claims, ours, and the σ that PLD would allow.

RDP is Opacus' accountant with its default orders, which DP-Cap names as its own; PLD is dp_accounting's.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpgcl_core.accounting.composition import MIN_NOISE_MULTIPLIER, epsilon_of_steps
from dpgcl_core.errors import require_extra
from dpgcl_core.mechanism.numbers import default_delta
from dpgcl_core.planning.solving import solve

PLD_GRID = 1e-3
"""Of the PLD figures; at a grid of 1e-4 they differ by less than 0.1 %."""
_SAME = 0.01


@dataclass(frozen=True, kw_only=True)
class Published:
    """A training as a paper gives it.

    Attributes:
      name: of method and data.
      source: paper and place.
      num_records: N.
      expected_batch_size: B.
      num_steps: T.
      noise_multiplier: σ, in units of the sensitivity.
      delta: δ.
      epsilon: as the paper claims.
      num_validation: records of the validation split, which are not among N.
    """

    name: str
    source: str
    num_records: int
    expected_batch_size: float
    num_steps: int
    noise_multiplier: float
    delta: float
    epsilon: float
    num_validation: int = 0


@dataclass(frozen=True, kw_only=True)
class Reproduced:
    """What the accountants say of it.

    Attributes:
      published: the paper's row.
      rdp_epsilon, pld_epsilon: of the published σ.
      pld_noise_multiplier: σ at which PLD gives the published ε.
      difference: ours against the paper's, in a sentence.
    """

    published: Published
    rdp_epsilon: float
    pld_epsilon: float
    pld_noise_multiplier: float
    difference: str


def _dpgcl(
    name: str, num_records: int, num_validation: int, batch: int, num_steps: int, noise: float
) -> Published:
    return Published(
        name=f"DP-GCL, {name}",
        source="DP-GCL, Table 9; N = training split of Table 8",
        num_records=num_records,
        expected_batch_size=batch,
        num_steps=num_steps,
        noise_multiplier=noise,
        delta=default_delta(num_records),
        epsilon=10.0,
        num_validation=num_validation,
    )


VIP = Published(
    name="ViP",
    source="ViP, Table 3",
    num_records=233_000_000,
    expected_batch_size=98_304,
    num_steps=6000,
    noise_multiplier=0.48,
    delta=1 / (2 * 233_000_000),
    epsilon=8.0,
)
DP_CAP = Published(
    name="DP-Cap",
    source="DP-Cap, Figure 3",
    num_records=233_000_000,
    expected_batch_size=1_300_000,
    num_steps=5708,
    noise_multiplier=0.728,
    delta=1 / 233_000_000,
    epsilon=8.0,
)
PUBLISHED = (
    VIP,
    DP_CAP,
    _dpgcl("Fashion-MNIST", 55_000, 5000, 2048, 1200, 0.97),
    _dpgcl("CIFAR-10", 45_000, 5000, 2048, 1200, 1.07),
    _dpgcl("EuroSAT", 21_000, 2000, 2048, 1200, 1.85),
    _dpgcl("Camelyon", 269_538, 32_898, 2048, 1200, 0.57),
    _dpgcl("ImageNet", 1_281_167, 50_000, 65_536, 1200, 2.52),
    _dpgcl("PEDES", 190_916, 23_882, 8192, 240, 0.76),
    _dpgcl("RSTPReid", 37_010, 2000, 8192, 160, 1.70),
    _dpgcl("Fashion", 32_029, 2000, 8192, 320, 2.53),
    _dpgcl("ROCO", 59_962, 9904, 8192, 560, 1.77),
)


def reproduced(row: Published) -> Reproduced:
    """Return what RDP and PLD say of a published training.

    >>> found = reproduced(DP_CAP)
    >>> round(found.rdp_epsilon, 2), round(found.pld_epsilon, 2), round(found.pld_noise_multiplier, 3)
    (8.02, 7.31, 0.706)
    """
    rdp = rdp_epsilon(row, row.num_records, row.delta)
    pld = _pld_epsilon(row, row.noise_multiplier)
    noise = solve(
        lambda noise: _pld_epsilon(row, noise),
        high=row.epsilon,
        share=0.001,
        start=row.noise_multiplier,
        slope=-1.5,
        least=MIN_NOISE_MULTIPLIER,
        most=1e3,
    )
    return Reproduced(
        published=row,
        rdp_epsilon=rdp,
        pld_epsilon=pld,
        pld_noise_multiplier=noise,
        difference=_difference(row, rdp, pld),
    )


def rdp_epsilon(row: Published, num_records: float, delta: float) -> float:
    """Return ε by Opacus' RDP accountant with its default orders, of the row's steps on N records.

    Raises:
      ExtraMissing: Opacus, of the extra `service`, is not installed.
    """
    require_extra("service", "opacus", needed_by="the ε of published results")
    from opacus.accountants.analysis import rdp as opacus_rdp  # slow to import

    orders = [*(1 + x / 10 for x in range(1, 100)), *range(12, 64)]
    curve = opacus_rdp.compute_rdp(
        q=row.expected_batch_size / num_records,
        noise_multiplier=row.noise_multiplier,
        steps=row.num_steps,
        orders=orders,
    )
    return float(opacus_rdp.get_privacy_spent(orders=orders, rdp=curve, delta=delta)[0])


def _pld_epsilon(row: Published, noise: float) -> float:
    return epsilon_of_steps(
        sampling_prob=row.expected_batch_size / row.num_records,
        noise_multiplier=noise,
        num_steps=row.num_steps,
        delta=row.delta,
        grid=PLD_GRID,
    )


def _difference(row: Published, rdp: float, pld: float) -> str:
    """Why our figures and the claim differ."""
    if abs(rdp - row.epsilon) <= _SAME * row.epsilon:
        return "RDP gives the claim; PLD is tighter, and the same ε takes less noise."
    if rdp < row.epsilon:
        return "The printed σ has more noise than the claim needs, by either accountant."
    with_validation = row.num_records + row.num_validation
    found = rdp_epsilon(row, with_validation, default_delta(with_validation))
    meets = "meets the claim" if pld <= row.epsilon else "does not meet the claim either"
    return (
        f"With the training split as N RDP is above the claim; with the validation split counted, too, "
        f"N = {with_validation}, it gives {found:.4g}. PLD at the training split {meets}."
    )
