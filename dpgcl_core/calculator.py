"""The privacy calculator: ε of a training, σ for a target ε, and the cost of tuning.

    python -m dpgcl_core.calculator epsilon --sampling-prob 0.01 --noise-multiplier 1 --num-steps 1000 \\
        --delta 1e-5
    python -m dpgcl_core.calculator noise --sampling-prob 0.01 --num-steps 1000 --delta 1e-5 --epsilon 2
    python -m dpgcl_core.calculator tuning --mode open --num-trials 10 \\
        --sampling-prob 0.01 --noise-multiplier 1 --num-steps 1000 --delta 1e-5
    python -m dpgcl_core.calculator tuning --mode sealed --law tnb --eta 1 --mean-trials 10 \\
        --sampling-prob 0.01 --noise-multiplier 1 --num-steps 1000 --delta 1e-5 --json

Poisson-subsampled Gaussian steps, for adding or removing one record; σ is noise std over sensitivity.
It prints a table, or one JSON object with `--json`. Bad input causes one line on stderr and exit code 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from json import dumps
from typing import Any, Literal

from dpgcl_core.accounting.tuning import laws
from dpgcl_core.command_line import run_command
from dpgcl_core.errors import ConfigError, exit_on_bad_input

Tuning = Literal["open", "sealed", "sealed-threshold"]


def epsilon_command(
    sampling_prob: float,
    noise_multiplier: float,
    num_steps: int,
    delta: float,
    accountant: Literal["pld", "rdp", "prv"] = "pld",
    json: bool = False,
) -> int:
    """Print ε of one training.

    Args:
      sampling_prob: q, in (0, 1].
      noise_multiplier: σ = noise std / sensitivity.
      num_steps: T, steps of one training.
      delta: δ, in (0, 1).
      accountant: pld gives the figure of record.
      json: print one JSON object.
    """
    from dpgcl_core.accounting import composition
    from dpgcl_core.accounting.attacks import AttackBounds
    from dpgcl_core.accounting.filters import StepClass
    from dpgcl_core.accounting.tuning.cost import NEIGHBORING_RELATION, check_affordable

    steps = _checked_steps(sampling_prob, noise_multiplier, num_steps, delta)
    event = composition.poisson_gaussian_event(**steps)
    if accountant != "rdp":
        check_affordable(event, delta)
    if accountant == "rdp":
        epsilon = composition.epsilon_rdp(event, delta)
    elif accountant == "pld":
        epsilon = composition.epsilon_of_steps(**steps, delta=delta)
    else:
        epsilon = composition.epsilon_prv(**steps, delta=delta)
        if math.isnan(epsilon):
            raise ConfigError("the accountant prv failed for these options; use --accountant pld or rdp")
    result = {"epsilon": epsilon, "delta": delta, "accountant": accountant, **steps}
    if accountant == "pld":
        bounds = AttackBounds.from_steps([{StepClass(sampling_prob, noise_multiplier): num_steps}])
        result |= asdict(bounds)
    return _print(result | {"neighboring_relation": NEIGHBORING_RELATION}, delta, as_json=json)


def noise_command(
    sampling_prob: float, num_steps: int, delta: float, epsilon: float, json: bool = False
) -> int:
    """Print the noise multiplier that meets a target ε by PLD.

    Args:
      sampling_prob: q, in (0, 1].
      num_steps: T, steps of one training.
      delta: δ, in (0, 1).
      epsilon: target ε.
      json: print one JSON object.
    """
    from dpgcl_core.accounting.composition import calibrate_noise_multiplier
    from dpgcl_core.accounting.tuning.cost import NEIGHBORING_RELATION

    steps = _checked_steps(sampling_prob, 1.0, num_steps, delta)  # 1 is a placeholder for the unknown noise
    del steps["noise_multiplier"]
    calibration = calibrate_noise_multiplier(**steps, target_epsilon=epsilon, target_delta=delta)
    result = {
        "noise_multiplier": calibration.noise_multiplier,
        "epsilon": calibration.epsilon,
        "target_epsilon": epsilon,
        "delta": delta,
        "accountant": "pld",
        **steps,
        "neighboring_relation": NEIGHBORING_RELATION,
    }
    return _print(result, delta, as_json=json)


def tuning_command(
    mode: Tuning,
    sampling_prob: float,
    noise_multiplier: float,
    num_steps: int,
    delta: float,
    num_trials: int | None = None,
    law: Literal["tnb", "poisson", "binomial"] | None = None,
    eta: float | None = None,
    mean_trials: float | None = None,
    max_trials: int | None = None,
    bound: Literal["profile", "pointwise", "ps22"] | None = None,
    halting_prob: float | None = None,
    json: bool = False,
) -> int:
    """Print ε of a sweep, tuning included.

    Args:
      mode: the release mode.
      sampling_prob: q, in (0, 1].
      noise_multiplier: σ = noise std / sensitivity.
      num_steps: T, steps of one training.
      delta: δ, in (0, 1).
      num_trials: number of trials, all released (open).
      law: law of the secret number of trials K (sealed); tnb by default.
      eta: shape of tnb, above -1 (sealed); 1 by default, the geometric law.
      mean_trials: E[K] before any cap, at least 1 (sealed).
      max_trials: cap on K (sealed and sealed-threshold); for a binomial, its largest number of trials.
      bound: theorem (sealed); profile by default.
      halting_prob: probability of stopping after a miss (sealed-threshold).
      json: print one JSON object.
    """
    from dpgcl_core.accounting.attacks import AttackBounds
    from dpgcl_core.accounting.tuning import cost

    steps = _checked_steps(sampling_prob, noise_multiplier, num_steps, delta)
    of_mode: dict[str, dict[str, Any]] = {
        "open": {"num_trials": num_trials},
        "sealed": {
            "law": law,
            "eta": eta,
            "mean_trials": mean_trials,
            "bound": bound,
        },
        "sealed-threshold": {"halting_prob": halting_prob},
    }
    for mode_of_options, options in of_mode.items():
        for name, value in options.items():
            if mode_of_options != mode and value is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} applies only to --mode {mode_of_options}; got --mode {mode}")
    if mode == "open" and max_trials is not None:
        raise ConfigError("--max-trials applies only to --mode sealed and sealed-threshold; got --mode open")
    candidate = cost.TrialClass(**steps)
    if mode == "open":
        trial = cost.TrialClass(**{**steps, "count": _required(mode, num_trials=num_trials)})
        tuning_cost = cost.open_cost([trial], delta=delta)
    elif mode == "sealed-threshold":
        tuning_cost = cost.sealed_threshold_cost(
            [candidate],
            halting_prob=_required(mode, halting_prob=halting_prob),
            delta=delta,
            max_trials=max_trials,
        )
    else:
        mean = _required(mode, mean_trials=mean_trials)
        trial_law = _law(law or "tnb", mean, eta, max_trials)
        tuning_cost = cost.sealed_cost([candidate], law=trial_law, delta=delta, bound=bound or "profile")
    bounds = AttackBounds.from_cost(tuning_cost)
    return _print(tuning_cost.as_dict() | (asdict(bounds) if bounds else {}), delta, as_json=json)


def _law(name: str, mean: float, eta: float | None, cap: int | None) -> laws.TrialCountLaw:
    """Return the law of the number of trials K from its name and parameters."""
    if name != "tnb" and eta is not None:
        raise ConfigError(f"--eta applies only to --law tnb; got --law {name}")
    if name == "binomial":
        if cap is None:
            raise ConfigError("--law binomial needs --max-trials, its largest number of trials")
        if cap < 1 or not mean < cap:
            raise ConfigError(f"--max-trials must be above --mean-trials = {mean:g}; got {cap}")
        return laws.BinomialTrials(max_trials=cap, prob=mean / cap)
    law: laws.TrialCountLaw = laws.PoissonTrials(mean_trials=mean)
    if name == "tnb":
        law = laws.TruncatedNegativeBinomial.from_mean(mean, eta=1.0 if eta is None else eta)
    return law if cap is None else laws.TruncatedTrials(law=law, max_trials=cap)


def _checked_steps(
    sampling_prob: float, noise_multiplier: float, num_steps: int, delta: float
) -> dict[str, Any]:
    """Return the values of a training's steps by name, or raise ConfigError if one is out of range."""
    from dpgcl_core.accounting.composition import check_delta_range
    from dpgcl_core.accounting.tuning.cost import TrialClass

    TrialClass(sampling_prob=sampling_prob, noise_multiplier=noise_multiplier, num_steps=num_steps)
    check_delta_range(delta)
    return {"sampling_prob": sampling_prob, "noise_multiplier": noise_multiplier, "num_steps": num_steps}


def _required(mode: str, **option: Any) -> Any:
    """Return the value of the one `option`, or raise ConfigError if it is None."""
    ((name, value),) = option.items()
    if value is None:
        raise ConfigError(f"--mode {mode} needs --{name.replace('_', '-')}")
    return value


def _print(result: Mapping[str, Any], delta: float, *, as_json: bool) -> int:
    for name, value in result.items():
        if name.endswith("epsilon") and value is not None and not math.isfinite(value):
            raise ConfigError(f"{name} is not finite at delta = {delta:g}; raise delta or the noise")
    print(dumps(result, allow_nan=False) if as_json else _table(result))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name; return 0.

    Raises:
      ConfigError: an option is unknown, missing or out of range.
    """
    commands: dict[str, Callable[..., int]] = {
        "epsilon": epsilon_command,
        "noise": noise_command,
        "tuning": tuning_command,
    }
    code: int = run_command(
        commands, prog="python -m dpgcl_core.calculator", description=__doc__, arguments=arguments
    )
    return code


def _table(result: Mapping[str, Any]) -> str:
    """Return the result as two columns, nested values flattened.

    >>> print(_table({"epsilon": 1.8282436, "law": {"eta": 1.0}, "reason": None}))
    epsilon    1.82824
    law: eta   1
    reason     -
    """
    rows: list[tuple[str, str]] = []
    for name, value in result.items():
        parts = value if isinstance(value, tuple) else (value,)
        for part in parts:
            if isinstance(part, Mapping):
                rows += [(f"{name}: {key}", _format_number(inner)) for key, inner in part.items()]
            else:
                rows.append((name, _format_number(part)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}   {value}" for name, value in rows)


def _format_number(value: object) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    exit_on_bad_input(main)
