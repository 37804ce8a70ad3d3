"""The plan: which trials, at which noise, from what data, and what is said about them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpgcl_core.accounting import composition
from dpgcl_core.accounting.tuning.cost import TrialClass, open_cost
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.numbers import default_delta
from dpgcl_core.sampling.record_ids import Ids
from dpgcl_core.sampling.slot_table import SlotTable
from sweeps.service.planning import sweep_data
from sweeps.service.planning.plan import SweepPlan, _data_params, cross_checks
from sweeps.service.planning.trials import ChargedSteps, Point, trial_class
from sweeps.service.privacy.sweep_statement import build_statement
from tests.sweeps import support
from tests.sweeps.support import plan_of, write_npz
from trainers.config.tree import leaves
from trainers.evaluation.features import first_records

Plan = Callable[..., SweepPlan]
Fingerprint = Callable[..., str]
# Without a calibration a plan takes a fraction of a second.
QUICK = ("--tiny", "--noise-multiplier", "1")


@pytest.fixture
def private(tmp_path: Path) -> str:
    """A private data set of 90 records of 8 × 8 pixels."""
    return write_npz(tmp_path / "own.npz", 90)


def test_trials_are_sizes_by_epsilon_within_each_repeat(make_plan: Plan) -> None:
    trials = make_plan(*QUICK, "--group-sizes", "4", "2", "--repeats", "2").trials
    assert [trial.name for trial in trials] == [
        f"S{size}-Na1-{kind}-r{repeat}"
        for repeat in (0, 1)
        for size in (4, 2)
        for kind in ("private", "eps-inf")
    ]


def test_default_is_eighteen_trials() -> None:
    from sweeps.group_size import points

    chosen = support.options()
    assert len(points(chosen)) * chosen.service.repeats == 18
    assert {point.changes["group_size"] for point in points(chosen)} == {4, 16, 64}


def test_num_augmentations_is_an_axis(make_plan: Plan) -> None:
    trials = make_plan(*QUICK, "--num-augmentations-grid", "0", "3").trials
    assert [(t.config.num_augmentations, t.config.mechanism.is_private) for t in trials] == [
        (0, True),
        (0, False),
        (3, True),
        (3, False),
    ]


def test_public_seed_is_one_per_repeat(make_plan: Plan) -> None:
    trials = make_plan(*QUICK, "--group-sizes", "2", "4", "--repeats", "3", "--seed", "5").trials
    seeds = {
        repeat: {t.config.public_seed for t in trials if t.params["repeat"] == repeat} for repeat in range(3)
    }
    assert seeds == {0: {5}, 1: {6}, 2: {7}}


@pytest.mark.ci
def test_noise_meets_the_target_within_half_a_percent(make_plan: Plan) -> None:
    mechanism = make_plan("--tiny").trials[0].config.mechanism
    assert 10 * 0.995 <= mechanism.epsilon() <= 10


def test_noise_is_calibrated_once_for_all_sizes_and_repeats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    searched = []
    search = composition.search_noise_multiplier
    noted = lambda *given: searched.append(given) or search(*given)  # noqa: E731
    monkeypatch.setattr(composition, "search_noise_multiplier", noted)
    arguments = ("--tiny", "--epsilon", "2", "--group-sizes", "2", "4", "batch", "--repeats", "2")
    trials = support.plan(*arguments, calibrations=tmp_path).trials
    assert len(searched) == 1
    assert len({t.config.mechanism.noise_multiplier for t in trials if t.config.mechanism.is_private}) == 1


def test_all_but_size_noise_and_seed_is_the_same_for_every_trial(make_plan: Plan) -> None:
    trials = make_plan(*QUICK, "--group-sizes", "2", "8", "batch", "--repeats", "2").trials
    plain = dataclasses.replace(
        trials[0].config.mechanism, group_size=2, sampling=None, noise_multiplier=0.0, l2_clip_norm=math.inf
    )
    for trial in trials:
        mechanism = dataclasses.replace(
            trial.config.mechanism,
            group_size=2,
            sampling=None,  # "batch" samples records
            noise_multiplier=0.0,
            l2_clip_norm=math.inf,
        )
        assert dataclasses.replace(trial.config, mechanism=mechanism, public_seed=0) == dataclasses.replace(
            trials[0].config, mechanism=plain, public_seed=0
        )


def test_delta_is_the_papers_unless_given(make_plan: Plan) -> None:
    plan = make_plan(*QUICK)
    assert plan.trials[0].config.mechanism.target_delta == default_delta(len(plan.data.train))


def test_taken_number_of_records_is_said_to_be_public(make_plan: Plan) -> None:
    said = " ".join(make_plan(*QUICK).notes)
    assert "number of records is taken from the data and therefore public" in said
    assert "number of records" not in " ".join(make_plan(*QUICK, "--num-records-public", "1500").notes)


@pytest.mark.ci
def test_private_data_have_no_trial_without_noise(make_plan: Plan, private: str) -> None:
    plan = make_plan(*QUICK, "--dataset", private)
    assert [trial.name for trial in plan.trials] == ["S4-Na1-private-r0"]
    assert "no trials at ε = ∞" in " ".join(plan.notes)


@pytest.mark.parametrize("more", [(), ("--no-non-private",)])
def test_private_data_refuse_an_infinite_epsilon(
    more: tuple[str, ...], refusal: Callable[..., str], private: str
) -> None:
    message = refusal("--tiny", "--dataset", private, "--epsilon", "inf", *more)
    assert "private data and sealed sweeps exclude trials with epsilon = inf" in message


def test_private_data_have_no_scores_of_their_own(make_plan: Plan, private: str) -> None:
    plan = make_plan(*QUICK, "--dataset", private)
    assert plan.data.index is None
    assert plan.data.queries is None
    assert len(plan.data.train) == 90
    assert any(
        note.startswith("There are no scores to compare trials by. Set --evaluate-on") for note in plan.notes
    )


@pytest.mark.ci
def test_noise_of_scores_is_said_in_advance(make_plan: Plan, private: str) -> None:
    held_out = ("--evaluate-on", "digits", "--score-on-held-out", "0.2", "--score-noise-multiplier", "9")
    plan = make_plan(*QUICK, "--dataset", private, *held_out)
    assert any("has standard deviation 0.5; hold out more records" in note for note in plan.notes)


def test_builtin_data_declared_private_are_treated_so(make_plan: Plan) -> None:
    plan = make_plan(*QUICK, "--data-is", "private")
    assert (plan.data.index, plan.data.train_is_public) == (None, False)
    assert all(trial.config.mechanism.is_private for trial in plan.trials)


def test_private_data_are_scored_on_public_data(make_plan: Plan, private: str) -> None:
    data = make_plan(*QUICK, "--dataset", private, "--evaluate-on", "digits").data
    assert data.index is not None
    assert data.queries is not None
    assert (len(data.train), data.train_is_public, data.evaluation_is_public) == (90, False, True)
    assert not set(data.index.ids) & set(data.train.ids)


def test_scores_need_images_of_one_shape(refusal: Callable[..., str], tmp_path: Path) -> None:
    larger = write_npz(tmp_path / "larger.npz", 90, size=12)
    message = refusal(*QUICK, "--dataset", larger, "--evaluate-on", "digits")
    assert "must have images of the training data's shape (1, 12, 12); got (1, 8, 8)" in message


def test_images_are_resized_to_one_shape(make_plan: Plan, tmp_path: Path) -> None:
    larger = write_npz(tmp_path / "larger.npz", 90, size=12)
    data = make_plan(*QUICK, "--dataset", larger, "--evaluate-on", "digits", "--image-size", "8").data
    assert data.index is not None
    assert data.train.images.shape[1:] == data.index.images.shape[1:] == (1, 8, 8)


@pytest.mark.parametrize("spelling", ["{}", "{}/../own.npz"])
def test_private_data_are_no_public_scores(
    spelling: str, refusal: Callable[..., str], tmp_path: Path
) -> None:
    write_npz(tmp_path / "own.npz", 90)
    (tmp_path / "sub").mkdir()
    other = {"{}": tmp_path / "own.npz"}.get(spelling, tmp_path / "sub" / ".." / "own.npz")
    message = refusal(*QUICK, "--dataset", f"npz:{tmp_path}/own.npz", "--evaluate-on", f"npz:{other}")
    assert "evaluate_on must be a public data set, other than the private training data" in message


def test_seeded_training_is_refused_for_private_data(refusal: Callable[..., str], private: str) -> None:
    assert "no guarantee" in refusal(*QUICK, "--dataset", private, "--seeded-non-private")


def test_private_data_refuse_plain_noise_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str], private: str
) -> None:
    monkeypatch.setattr(support, "load_training_data", lambda *_, **__: pytest.fail("the data were read"))
    assert "cryptographic stream only" in refusal(*QUICK, "--dataset", private, "--no-secure-noise")


def test_word_for_a_network_of_this_package_is_refused(refusal: Callable[..., str]) -> None:
    assert "got small_cnn, which is this package's. Leave it out" in refusal(
        "--dataset", "digits", "--mixes-no-records", "--network", "small_cnn"
    )


def test_seeded_training_with_the_stream_is_refused(refusal: Callable[..., str]) -> None:
    assert "Leave out one of them" in refusal(*QUICK, "--seeded-non-private", "--secure-noise")


def test_randomness_is_shown_for_what_it_will_be(make_plan: Plan, private: str) -> None:
    for arguments, words in (
        (("--dataset", private), "ChaCha20"),
        (("--secure-noise",), "ChaCha20"),
        ((), "PCG64DXSM, seeded afresh by the operating system"),
        (("--seeded-non-private",), "NO GUARANTEE"),
    ):
        plan = make_plan(*QUICK, *arguments)
        for shown in (plan.params()["randomness"], build_statement(plan, "one").randomness):
            assert words in str(shown)


def test_asking_private_data_for_the_stream_changes_nothing(make_plan: Plan, private: str) -> None:
    plans = [make_plan(*QUICK, "--dataset", private, *more) for more in ((), ("--secure-noise",))]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert plans[0].params()["randomness"] == plans[1].params()["randomness"]


def test_seeded_training_is_labelled(make_plan: Plan) -> None:
    trials = make_plan(*QUICK, "--seeded-non-private").trials
    assert {trial.params["guarantee_label"] for trial in trials} == {"none"}


@pytest.mark.ci
def test_declared_number_of_records_decides_all_that_depends_on_n(make_plan: Plan, private: str) -> None:
    mechanism = (
        make_plan(*QUICK, "--dataset", private, "--num-records-public", "93").trials[0].config.mechanism
    )
    assert mechanism.sampling_prob == 64 / 93
    assert mechanism.target_delta == default_delta(93)
    assert mechanism.num_records_public == 93
    assert mechanism.divisor == pytest.approx(64 / 93 * (93 // 4))


@pytest.mark.ci
def test_declared_number_hides_one_record_from_all_but_the_data(make_plan: Plan, tmp_path: Path) -> None:
    plans = [
        make_plan(
            *QUICK, "--num-records-public", "92", "--dataset", write_npz(tmp_path / "own.npz", 90, drop=drop)
        )
        for drop in (None, 41)
    ]
    with_record, without = plans
    assert len(with_record.data.train) == len(without.data.train) + 1
    assert set(without.data.train.ids) < set(with_record.data.train.ids)
    for attribute in ("trials", "notes", "fingerprint"):
        assert getattr(with_record, attribute) == getattr(without, attribute)
    assert (with_record.params(), with_record.tags()) == (without.params(), without.tags())


CHANGES = {
    "--group-sizes": "8",
    "--repeats": "2",
    "--seed": "1",
    "--early-stopping": "asha",
    "--num-augmentations": "2",
    "--method": "siglip_groups",
    "--clipping": "automatic",
    "--probe-datasets": "{own}",
    "--noise-multiplier": "2",
    "--sampling": "records",
    "--shards": "2",
    "--delta": "1e-5",
    "--num-records-public": "1500",
    "--expected-batch-size": "65",
    "--num-steps": "11",
    "--restart-steps": "3",
    "--l2-clip-norm": "2",
    "--temperature": "0.3",
    "--network": "small_cnn",
    "--embedding-dim": "32",
    "--optimizer": "sgd",
    "--learning-rate": "0.5",
    "--weight-decay": "0.1",
    "--momentum": "0.5",
    "--warmup-steps": "2",
    "--learning-rate-decay": "cosine",
    "--ema-decay": "0.9",
    "--min-crop-area": "0.4",
    "--max-crop-area": "0.9",
    "--flip-prob": "0.3",
    "--brightness": "0.3",
    "--contrast": "0.3",
    "--saturation": "0.3",
    "--hue": "0.1",
    "--blur-prob": "0.3",
    "--min-blur-sigma": "0.2",
    "--max-blur-sigma": "1.6",
    "--max-index-records": "400",
    "--max-query-records": "400",
    "--num-neighbors": "5",
    "--readout": "grid4",
    "--record-every-steps": "3",
    "--score-every-steps": "5",
    "--test-fraction": "0.3",
    "--image-size": "9",
    "--max-image-pixels": "60000000",
    "--dataset": "{own}",
    "--evaluate-on": "{own}",
    "--data-is": "private",
    "--sampling-prob": "0.2",
    "--precision": "bfloat16",
    "--loss-scale": "64",
    "--snr-noise-multiplier": "5",
    "--release": "sealed",
}
FLAGS = ("--no-non-private", "--seeded-non-private", "--no-also-untrained", "--secure-noise")
NO_CHANGES = {
    "--index-folder": "elsewhere",
    "--num-workers": "2",
    "--threads-per-worker": "2",
    "--max-views-per-microbatch": "64",
    "--checkpoint-every-steps": "3",
    "--device": "cpu",
    "--storage": "/tmp",
    "--name": "other",
    "--tracking-uri": "http://127.0.0.1:9",
    "--gpus-per-worker": "1",
    "--max-concurrent-trials": "1",
    "--max-restarts": "0",
    "--wait-for-resources": "3",
    "--trial-timeout": "30",
    "--stall-timeout": "20",
    "--time-budget": "60",
    "--listener": "team.chat:Chat",
    "--total-epsilon": "5",
    "--ledger": "unused",
    "--dataset-id": "scans",
}
# Options that mean something with others only, which are given on both sides.
SEALED = ("--release", "sealed")
THRESHOLD = ("--release", "sealed-threshold", "--min-score", "0.5")
NOISED = ("--dataset", "{own}", "--evaluate-on", "digits")
NOISED += ("--score-on-held-out", "0.3", "--score-noise-multiplier", "5")
WITH_OTHERS: dict[str, tuple[tuple[str, ...], str]] = {
    "--mean-trials": (SEALED, "5"),
    "--eta": (SEALED, "0"),
    "--bound": (SEALED, "ps22"),
    "--publish-after": (SEALED, "600"),
    "--select-by": (SEALED, "linear_probe_accuracy"),
    "--halting-prob": (THRESHOLD, "0.2"),
    "--min-score": (THRESHOLD, "0.6"),
    "--score-on-held-out": (NOISED, "0.4"),
    "--score-noise-multiplier": (NOISED, "6"),
    "--batch-cap": (("--method", "dp_sgd"), "90"),
    "--tan-factor": ((), "2"),
    "--patch-size": (("--method", "dp_mae"), "2"),
    "--mask-ratio": (("--method", "dp_mae"), "0.5"),
    "--class-captions": (("--dataset", "digits", "--image-size", "32"), "a {}"),
    "--num-classes": (("--method", "dp_classifier", "--num-classes", "10"), "11"),
    "--trained-layers": (("--method", "dp_classifier"), "all"),
    "--tie-embeddings": (("--dataset", "shapes:400", "--method", "dp_cap"), ""),
    "--unit-column": (
        ("--dataset", "{own}", "--num-records-public", "200", "--sampling", "records"),
        "person",
    ),
    "--drop-overlap": (
        (
            "--dataset",
            "{own}",
            "--evaluate-on",
            "digits",
            "--num-records-public",
            "200",
            "--sampling",
            "records",
        ),
        "copies",
    ),
    "--mixes-no-records": (("--network", "tests.sweeps.networks:plain"), ""),
}
PAIRS_ALONE = {
    *("--pretrained", "--lora-rank", "--lora-alpha", "--lora-targets", "--lora-towers"),
    *("--learn-temperature", "--per-tower-clipping", "--gradient-checkpointing"),
    *("--sentence-swap-prob", "--word-swap-prob", "--word-delete-prob"),
    *("--csv-separator", "--csv-img-key", "--csv-caption-key", "--csv-split-key"),
    *("--csv-label-key", "--skip-corrupt"),
}
NO_CHANGE_FLAGS = (
    "--in-memory",
    "--no-secure-noise",
    "--worker-processes",
    "--prefetch",
    "--resume",
    "--dry-run",
    "--quiet",
    "--no-ledger",
    "--no-references",
)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """200 rows of 100 persons."""
    return write_persons(tmp_path_factory.mktemp("data") / "own.npz")


def write_persons(path: Path, *, drop_person: int | None = None, drop_row: int | None = None) -> str:
    """Writes 200 rows of 100 persons, or leaves one person or row out."""
    write_npz(path, 200)
    rows = np.arange(200)
    kept = (rows % 100 != drop_person) & (rows != drop_row)
    arrays = dict(np.load(path)) | {"person": rows % 100}
    np.savez(path, **{name: values[kept] for name, values in arrays.items()})
    return f"npz:{path}"


@pytest.mark.parametrize("option", [*CHANGES, *FLAGS])
def test_fingerprint_changes_with_what_decides_the_results(
    option: str, fingerprint: Fingerprint, own: str
) -> None:
    given = [option, CHANGES[option].format(own=own)] if option in CHANGES else [option]
    if option == "--evaluate-on":
        given += ["--data-is", "public"]
    assert fingerprint(*QUICK, *given) != fingerprint(*QUICK)


@pytest.mark.ci
@pytest.mark.parametrize("option", WITH_OTHERS)
def test_fingerprint_changes_with_options_that_need_others(
    option: str, fingerprint: Fingerprint, own: str
) -> None:
    others, value = WITH_OTHERS[option]
    given = [*QUICK, "--expected-batch-size", "32", *(each.format(own=own) for each in others)]
    assert fingerprint(*given, option, *([value] if value else [])) != fingerprint(*given)


@pytest.mark.parametrize("option", [*NO_CHANGES, *NO_CHANGE_FLAGS])
def test_fingerprint_is_the_same_for_performance_and_storage(option: str, fingerprint: Fingerprint) -> None:
    given = [option, NO_CHANGES[option]] if option in NO_CHANGES else [option]
    assert fingerprint(*QUICK, *given) == fingerprint(*QUICK)


def test_fingerprint_tests_cover_every_option() -> None:
    from sweeps.group_size import GroupSizeOptions
    from sweeps.service.options.start import Start

    lists = (*CHANGES, *FLAGS, *WITH_OTHERS, *NO_CHANGES, *NO_CHANGE_FLAGS)
    covered = {o if o == "--no-ledger" else o.replace("--no-", "--") for o in lists}
    covered |= {"--epsilon", "--group-size", "--num-augmentations-grid", "--setting", "--tiny", "--full"}
    covered |= {"--epsilon-grid", "--sampling-grid"}  # axes, as the one above
    covered |= {"--tuning", "--tuning-rates", "--small-epsilons", "--proxy"}  # test_strategies.py
    covered |= {"--config"}  # tests/sweeps/test_config_file.py
    covered |= {"--warm-start"}  # tests/trainers/training/test_warm_start.py has weights to start from
    covered |= PAIRS_ALONE  # tests/sweeps/test_pairs_plan.py
    named = {"--" + name.replace("_", "-") for each in (Start, GroupSizeOptions) for name in leaves(each)}
    assert named == covered


def test_params_of_the_sweep_are_those_its_trials_share(make_plan: Plan) -> None:
    plan = make_plan(*QUICK, "--repeats", "2")
    shared = plan.params()
    assert (shared["question"], shared["num_trials"], shared["dataset"]) == ("group-size", 4, "digits")
    assert shared["learning_rate"] == plan.trials[0].config.optimizer.learning_rate
    assert not {"noise_multiplier", "target_epsilon", "public_seed", "repeat"} & set(shared)


def test_params_tell_how_many_public_records_score_and_the_share_of_their_largest_class(
    make_plan: Plan, private: str
) -> None:
    for arguments in ((), ("--dataset", private, "--evaluate-on", "digits", "--method", "dp_gcl")):
        plan = make_plan(*QUICK, "--max-query-records", "100", *arguments)
        labels = first_records(plan.data.queries, 100).labels
        shared = plan.params()
        assert shared["num_scored_records"] == len(labels) == 100  # type: ignore[arg-type]
        assert shared["scored_majority_share"] == np.bincount(labels).max() / 100  # type: ignore[arg-type]
        assert plan.trials[0].params["num_scored_records"] == 100


def test_params_tell_nothing_of_records_that_are_scored_and_not_public(make_plan: Plan, private: str) -> None:
    plan = make_plan(*QUICK, "--dataset", private)
    told = {"num_scored_records", "scored_majority_share"}
    assert not told & {*plan.params(), *plan.trials[0].params}
    hidden = dataclasses.replace(make_plan(*QUICK).data, evaluation_is_public=False)
    assert not told & set(_data_params(hidden, plan.trials[0].config.evaluation))


def test_params_of_a_trial_tell_the_guarantee(make_plan: Plan) -> None:
    private, bare = (trial.params for trial in make_plan("--tiny").trials)
    assert (private["target_epsilon"], bare["target_epsilon"]) == (10, math.inf)
    assert (private["guarantee_label"], bare["guarantee_label"]) == ("proven", "none")
    assert (private["neighboring_relation"], private["sampling"]) == (
        "zero out one record",
        "Poisson, of groups",
    )


@pytest.mark.parametrize(
    ("arguments", "relation", "sampling", "times_clip_norm"),
    [
        (("--num-records-public", "1445"), "add or remove one record", "Poisson, of groups", 1),
        (("--sampling", "records"), "zero out one record", "Poisson", 2),
    ],
)
def test_params_tell_what_is_sampled_and_between_which_data_sets(
    arguments: tuple[str, ...], relation: str, sampling: str, times_clip_norm: int, make_plan: Plan
) -> None:
    trial = make_plan("--tiny", *arguments).trials[0]
    told = (trial.params["neighboring_relation"], trial.params["sampling"], trial.params["sensitivity"])
    assert told == (relation, sampling, times_clip_norm * trial.config.mechanism.l2_clip_norm)


def test_params_show_the_epsilon_of_a_given_noise(make_plan: Plan) -> None:
    trial = make_plan(*QUICK).trials[0]
    assert trial.params["target_epsilon"] == pytest.approx(trial.config.mechanism.epsilon(), abs=1e-3)


def test_tags_tell_whether_data_are_private(make_plan: Plan, private: str) -> None:
    public, own = make_plan(*QUICK).tags(), make_plan(*QUICK, "--dataset", private).tags()
    assert (public["data_is"], own["data_is"]) == ("public", "private")
    assert ("research" in public, "research" in own) == (True, False)


def test_tags_carry_the_cost_of_the_whole_sweep(make_plan: Plan) -> None:
    plan = make_plan(*QUICK, "--repeats", "2")
    tags, mechanism = plan.tags(), plan.trials[0].config.mechanism
    planned = TrialClass(
        sampling_prob=mechanism.sampling_prob, noise_multiplier=1.0, num_steps=mechanism.num_steps, count=2
    )
    cost = open_cost([planned], delta=mechanism.target_delta)
    assert float(tags["tuned_epsilon"]) == pytest.approx(cost.tuned_epsilon, rel=1e-5)
    assert (tags["release_mode"], tags["tuning_theorem"]) == ("open", cost.theorem)
    assert tags["tuning_cost"].startswith("Open release: all 2 trials together ε = ")


@pytest.mark.ci
def test_cross_checks_agree_with_the_accountant_of_record(make_plan: Plan) -> None:
    trial = make_plan(*QUICK).trials[0]
    mechanism = trial.config.mechanism
    checks = cross_checks(trial_class(trial), mechanism.target_delta)
    assert checks["epsilon_prv"] == pytest.approx(mechanism.epsilon(), rel=0.02)
    assert checks["epsilon_rdp"] >= mechanism.epsilon() * 0.99


def test_cross_checks_are_of_the_steps_charged(make_plan: Plan) -> None:
    trial = make_plan(*QUICK).trials[0]
    planned, charged = (
        cross_checks(trial_class(trial, ChargedSteps(num_steps=num)), trial.config.mechanism.target_delta)
        for num in (10, 15)
    )
    assert charged["epsilon_rdp"] > planned["epsilon_rdp"]
    assert charged["epsilon_prv"] > planned["epsilon_prv"]


@pytest.mark.ci
@pytest.mark.parametrize("noise", ["snr", pytest.param("score", marks=pytest.mark.ci)])
def test_cross_checks_hold_the_noised_releases_or_are_left_out(
    noise: str, make_plan: Plan, private: str
) -> None:
    given = ("--snr-noise-multiplier", "1") if noise == "snr" else (*HELD_OUT, "0.3")
    trial = make_plan(*QUICK, *SMALL, "--dataset", private, *given).trials[0]
    checks = cross_checks(trial_class(trial), trial.config.mechanism.target_delta)
    assert set(checks) == {"epsilon_rdp"}
    assert checks["epsilon_rdp"] >= trial.config.epsilon() * 0.99 > trial.config.mechanism.epsilon() * 1.02


SMALL = ("--expected-batch-size", "32")
HELD_OUT = ("--evaluate-on", "digits", "--score-on-held-out", "0.3", "--score-noise-multiplier")


@pytest.mark.ci
def test_held_out_records_are_scored_and_not_trained_on(make_plan: Plan, private: str) -> None:
    whole = make_plan(*QUICK, *SMALL, "--dataset", private).data.train
    data = make_plan(*QUICK, *SMALL, "--dataset", private, *HELD_OUT, "5").data
    assert data.held_out_records is not None
    assert 10 < len(data.held_out_records) < 45
    assert sorted([*data.train.ids, *data.held_out_records.ids]) == sorted(whole.ids)


@pytest.mark.ci
def test_held_out_records_count_among_the_public_number(make_plan: Plan, private: str) -> None:
    given = (*QUICK, *SMALL, "--dataset", private, *HELD_OUT, "5")
    for more, total in (((), 90), (("--num-records-public", "93"), 93)):
        plan = make_plan(*given, *more)
        config = plan.trials[0].config
        assert plan.num_records_public == total
        assert config.mechanism.num_records_public == round(total * 0.7)
        assert config.mechanism.num_records_public + config.num_scored_public == total
        assert config.mechanism.target_delta == default_delta(total)


@pytest.fixture
def one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all plans of a test have the slots of the first one's records."""
    tables: dict[int, SlotTable] = {}

    def slots_for(capacity: int, ids: Ids) -> SlotTable:
        known = tables.get(capacity)
        if known is None:
            tables[capacity] = known = SlotTable.empty(capacity).holding(ids, np.random.default_rng(6))
        return known.holding(ids, None)

    monkeypatch.setattr(sweep_data, "_fresh_slots", slots_for)


@pytest.mark.ci
@pytest.mark.usefixtures("one_table")
@pytest.mark.parametrize(
    ("unit", "name", "capacity"),
    [((), "drop_row", "202"), (("--unit-column", "person"), "drop_person", "101")],
)
def test_noised_plan_tells_nothing_of_one_record(
    unit: tuple[str, ...], name: str, capacity: str, make_plan: Plan, tmp_path: Path
) -> None:
    """Whether the record that is left out would have been trained on or scored."""
    given = (*QUICK, *SMALL, "--num-records-public", capacity, *HELD_OUT, "5", "--snr-noise-multiplier", "5")
    sides: set[tuple[int, ...]] = set()
    full = make_plan(*given, *unit, "--dataset", write_persons(tmp_path / "own.npz"))
    for drop in itertools.takewhile(lambda _: len(sides) < 2, range(30)):
        own = write_persons(tmp_path / "own.npz", **{name: drop})
        other = make_plan(*given, *unit, "--dataset", own)
        pairs = [(p.data.train, p.data.held_out_records) for p in (full, other)]
        sides.add(tuple(len(before) - len(after) for before, after in zip(*pairs, strict=True)))  # type: ignore[arg-type]
        for attribute in ("trials", "notes", "fingerprint", "num_records_public"):
            assert getattr(full, attribute) == getattr(other, attribute)
        assert (full.params(), full.tags()) == (other.params(), other.tags())
    assert sides == {(0, 1), (1, 0)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--data-is", "public", *HELD_OUT, "5"), "applies only to private training data"),
        ((*HELD_OUT[2:], "5"), "Also set --evaluate-on to a public labelled data set"),
        (HELD_OUT[:4], "set both --score-on-held-out and --score-noise-multiplier, or neither"),
        ((*HELD_OUT, "0.01"), "--score-noise-multiplier must be finite and at least 0.1"),
        ((*HELD_OUT[:3], "1", *HELD_OUT[4:], "5"), "--score-on-held-out must be a share in [0, 1)"),
        (("--unit-column", "nobody"), "unit_column must name an array"),
        (("--dataset", "digits", "--unit-column", "person"), "unit_column must name a column of npz:PATH"),
    ],
)
def test_noised_scores_and_units_are_refused_in_planning(
    arguments: tuple[str, ...], words: str, refusal: Callable[..., str], private: str
) -> None:
    assert words in refusal(*QUICK, *SMALL, "--dataset", private, *arguments)


def test_noised_scores_need_labels_that_no_record_can_change(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    write_npz(tmp_path / "own.npz", 90)
    arrays = dict(np.load(tmp_path / "own.npz"))
    np.savez(tmp_path / "own.npz", images=arrays["images"], labels=arrays["labels"].astype(str))
    message = refusal(*QUICK, *SMALL, "--dataset", f"npz:{tmp_path / 'own.npz'}", *HELD_OUT, "5")
    assert "got text labels" in message


def test_share_held_out_must_be_the_same_in_all_trials(private: str) -> None:
    chosen = support.options(*QUICK, *SMALL, "--dataset", private, *HELD_OUT, "5")
    varied = [Point(label=f"share-{share}", changes={"score_on_held_out": share}) for share in (0.3, 0.4)]
    with pytest.raises(ConfigError, match=r"got 0\.3, and 0\.4 at the point share-0\.4"):
        plan_of("question", chosen, varied, calibration_folder=None)
    assert len(plan_of("question", chosen, varied[:1], calibration_folder=None).trials) == 1


@pytest.mark.ci
def test_rows_of_one_unit_are_one_record(make_plan: Plan, own: str) -> None:
    rows, persons = (
        make_plan(*QUICK, *SMALL, "--dataset", own, "--evaluate-on", "digits", *unit)
        for unit in ((), ("--unit-column", "person"))
    )
    assert (len(rows.data.train), len(persons.data.train)) == (200, 100)
    assert (rows.num_records_public, persons.num_records_public) == (200, 100)
    assert "One record is all rows with the same value of person." in persons.notes


def test_statement_names_the_unit(make_plan: Plan, own: str) -> None:
    said = [
        dict(build_statement(make_plan(*QUICK, *SMALL, "--dataset", own, *unit), "one").lines())
        for unit in ((), ("--unit-column", "person"))
    ]
    assert said[0]["One record"] == "one row; a person with k of them gets group privacy (k times)"
    assert said[1]["One record"] == "all rows with the same value of person"


def test_params_show_the_epsilon_of_all_that_a_trial_releases(make_plan: Plan) -> None:
    trial = make_plan(*QUICK, "--snr-noise-multiplier", "1").trials[0]
    assert trial.params["target_epsilon"] == pytest.approx(trial.config.epsilon(), abs=1e-3)
    assert trial.params["target_epsilon"] > trial.config.mechanism.epsilon() + 0.01


def test_copy_of_the_private_images_is_no_public_evaluation_set(
    refusal: Callable[..., str], tmp_path: Path
) -> None:
    own = write_npz(tmp_path / "own.npz", 90)
    images = np.load(tmp_path / "own.npz")["images"]
    np.savez(tmp_path / "other.npz", images=images[::-1][:40], labels=np.arange(40) % 2)
    message = refusal(*QUICK, "--dataset", own, "--evaluate-on", f"npz:{tmp_path / 'other.npz'}")
    assert "holds images of the private training data" in message


def test_missing_data_file_is_told_by_its_name(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "gone.npz" in refusal(*QUICK, "--dataset", f"npz:{tmp_path / 'gone.npz'}")


def test_images_of_several_shapes_are_refused(refusal: Callable[..., str], tmp_path: Path) -> None:
    sizes = {"train_images": (40, 8, 8), "test_images": (20, 9, 9)}
    np.savez(tmp_path / "mixed.npz", **{k: np.zeros(v, np.uint8) for k, v in sizes.items()})
    assert "must have the same shape" in refusal(*QUICK, "--dataset", f"npz:{tmp_path / 'mixed.npz'}")
