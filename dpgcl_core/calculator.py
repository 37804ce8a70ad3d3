"""The privacy calculator: ε of a training, σ for a target ε, and what tuning costs.

    python -m dpgcl_core.calculator epsilon --sampling-prob 0.01 --noise-multiplier 1 --num-steps 1000 \\
        --delta 1e-5
    python -m dpgcl_core.calculator noise --sampling-prob 0.01 --num-steps 1000 --delta 1e-5 --epsilon 2
    python -m dpgcl_core.calculator tuning --mode open --num-trials 10 \\
        --sampling-prob 0.01 --noise-multiplier 1 --num-steps 1000 --delta 1e-5
    python -m dpgcl_core.calculator tuning --mode sealed --law tnb --eta 1 --mean-trials 10 \\
        --sampling-prob 0.01 --noise-multiplier 1 --num-steps 1000 --delta 1e-5 --json

Poisson-subsampled Gaussian steps, for adding or removing one record; σ is noise std over sensitivity.
Prints a table, or with `--json` one JSON object. Bad input is one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dpgcl_core.errors import ConfigError, StrictParser, exit_on_bad_input, unknown_choice

_LAWS = ("tnb", "poisson", "binomial")
_BOUNDS = ("profile", "pointwise", "ps22")
_MODES = ("open", "sealed", "sealed-threshold")
# Options that only some modes have; giving one to another mode is a mistake worth stopping at.
_OPTIONS_OF_MODE = {
    "open": ("num_trials",),
    "sealed": ("law", "eta", "mean_trials", "max_trials", "bound"),
    "sealed-threshold": ("halting_prob",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns 0.

    Raises:
      ConfigError: an option is unknown, missing or out of range.
    """
    parser, commands = _parsers()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        valid = [name for name in commands[options.command]._option_string_actions if name[:2] == "--"]
        raise ConfigError(unknown_choice("option", unknown[0], valid))
    result = {"epsilon": _epsilon, "noise": _noise, "tuning": _tuning}[options.command](options)
    for name, value in result.items():
        if name.endswith("epsilon") and value is not None and not math.isfinite(value):
            raise ConfigError(f"no finite {name} at delta = {options.delta:g}; raise delta or the noise")
    print(json.dumps(result, allow_nan=False) if options.json else _table(result))
    return 0


def _epsilon(options: argparse.Namespace) -> dict[str, Any]:
    from dpgcl_core.accounting import composition
    from dpgcl_core.accounting.tuning.cost import NEIGHBORING_RELATION, check_affordable

    steps = _checked_steps(options)
    event = composition.poisson_gaussian_event(**steps)
    if options.accountant != "rdp":
        check_affordable(event, options.delta)
    if options.accountant == "rdp":
        epsilon = composition.epsilon_rdp(event, options.delta)
    elif options.accountant == "pld":
        epsilon = composition.epsilon_of_steps(**steps, delta=options.delta)
    else:
        epsilon = composition.epsilon_prv(**steps, delta=options.delta)
        if math.isnan(epsilon):
            raise ConfigError("the accountant prv gives up on these options; use --accountant pld or rdp")
    return {
        "epsilon": epsilon,
        "delta": options.delta,
        "accountant": options.accountant,
        **steps,
        "neighboring_relation": NEIGHBORING_RELATION,
    }


def _noise(options: argparse.Namespace) -> dict[str, Any]:
    from dpgcl_core.accounting.composition import calibrate_noise_multiplier
    from dpgcl_core.accounting.tuning.cost import NEIGHBORING_RELATION

    options.noise_multiplier = 1.0  # stands in for the one that is sought
    steps = _checked_steps(options)
    del steps["noise_multiplier"]
    found = calibrate_noise_multiplier(
        **steps, target_epsilon=options.epsilon, target_delta=options.delta, cache_folder=None
    )
    return {
        "noise_multiplier": found.noise_multiplier,
        "epsilon": found.epsilon,
        "target_epsilon": options.epsilon,
        "delta": options.delta,
        "accountant": "pld",
        **steps,
        "neighboring_relation": NEIGHBORING_RELATION,
    }


def _tuning(options: argparse.Namespace) -> dict[str, Any]:
    from dpgcl_core.accounting.tuning import cost as selection

    steps = _checked_steps(options)
    for mode, names in _OPTIONS_OF_MODE.items():
        for name in names:
            if mode != options.mode and getattr(options, name) is not None:
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} belongs to --mode {mode}; got it with --mode {options.mode}")
    if options.mode == "open":
        count = _required(options, "num_trials")
        trial = selection.TrialClass(**{**steps, "count": count})
        return selection.open_cost([trial], delta=options.delta).as_dict()
    candidate = selection.TrialClass(**steps)
    if options.mode == "sealed-threshold":
        halting_prob = _required(options, "halting_prob")
        cost = selection.sealed_threshold_cost([candidate], halting_prob=halting_prob, delta=options.delta)
    else:
        cost = selection.sealed_cost(
            [candidate], law=_law(options), delta=options.delta, bound=options.bound or "profile"
        )
    return cost.as_dict()


def _law(options: argparse.Namespace) -> Any:
    """The law of K that the options name."""
    from dpgcl_core.accounting.tuning import laws

    name, mean, cap = options.law or "tnb", _required(options, "mean_trials"), options.max_trials
    if name != "tnb" and options.eta is not None:
        raise ConfigError(f"--eta belongs to --law tnb; got it with --law {name}")
    if name == "binomial":
        if cap is None:
            raise ConfigError("--law binomial needs --max-trials, its number of possible trials")
        if cap < 1 or not mean < cap:
            raise ConfigError(f"--max-trials must be above --mean-trials = {mean:g}; got {cap}")
        return laws.BinomialTrials(max_trials=cap, prob=mean / cap)
    law: laws.TrialCountLaw = laws.PoissonTrials(mean_trials=mean)
    if name == "tnb":
        law = laws.TruncatedNegativeBinomial.from_mean(mean, eta=1.0 if options.eta is None else options.eta)
    return law if cap is None else laws.TruncatedTrials(law=law, max_trials=cap)


def _checked_steps(options: argparse.Namespace) -> dict[str, Any]:
    from dpgcl_core.accounting.tuning.cost import TrialClass, check_delta

    steps = {name: getattr(options, name) for name in ("sampling_prob", "noise_multiplier", "num_steps")}
    TrialClass(**steps)
    check_delta(options.delta)
    return steps


def _required(options: argparse.Namespace, name: str) -> Any:
    value = getattr(options, name)
    if value is None:
        raise ConfigError(f"--mode {options.mode} needs --{name.replace('_', '-')}")
    return value


def _table(result: Mapping[str, Any]) -> str:
    """The result as two columns, nested values flattened.

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
                rows += [(f"{name}: {key}", _shown(inner)) for key, inner in part.items()]
            else:
                rows.append((name, _shown(part)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}   {value}" for name, value in rows)


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


def _parsers() -> tuple[StrictParser, dict[str, argparse.ArgumentParser]]:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = StrictParser(
        prog="python -m dpgcl_core.calculator",
        description=__doc__,
        formatter_class=formatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands: dict[str, argparse.ArgumentParser] = {}
    for name, purpose in (
        ("epsilon", "ε of one training"),
        ("noise", "the noise multiplier that meets a target ε by PLD"),
        ("tuning", "ε of a sweep: what tuning adds to one training"),
    ):
        command = subparsers.add_parser(name, help=purpose, description=purpose, allow_abbrev=False)
        _add_common(command, with_noise=name != "noise")
        commands[name] = command
    commands["epsilon"].add_argument(
        "--accountant", choices=("pld", "rdp", "prv"), default="pld", help="pld is the figure of record"
    )
    commands["noise"].add_argument("--epsilon", type=_number, required=True, help="target ε")
    _add_tuning(commands["tuning"])
    return parser, commands


def _add_common(parser: argparse.ArgumentParser, *, with_noise: bool) -> None:
    add = parser.add_argument
    add("--sampling-prob", type=_number, required=True, help="q, in (0, 1]")
    if with_noise:
        add("--noise-multiplier", type=_number, required=True, help="σ = noise std / sensitivity")
    add("--num-steps", type=_whole, required=True, help="T, steps of one training")
    add("--delta", type=_number, required=True, help="δ, in (0, 1)")
    add("--json", action="store_true", help="print one JSON object")


def _add_tuning(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--mode", choices=_MODES, required=True, help="what is released")
    add("--num-trials", type=_whole, help="open: number of trials, all released")
    add("--law", choices=_LAWS, help="sealed: law of the secret number of trials K (tnb)")
    add("--eta", type=_number, help="sealed, tnb: shape, above -1 (1: geometric)")
    add("--mean-trials", type=_number, help="sealed: E[K], at least 1, before any cap")
    add("--max-trials", type=_whole, help="sealed: cap on K; of a binomial, its possible trials")
    add("--bound", choices=_BOUNDS, help="sealed: theorem (profile)")
    add("--halting-prob", type=_number, help="sealed-threshold: probability to stop after a miss")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number; got {text!r}") from None


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number; got {text!r}") from None


if __name__ == "__main__":
    exit_on_bad_input(main)
