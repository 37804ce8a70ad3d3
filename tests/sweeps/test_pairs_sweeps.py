"""Sweeps of pairs of images and texts: their points, what is scored, and what they leave out."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from dashboards.compose.questions import ADAPTED_LAYERS, AUGMENTATIONS, NETWORKS
from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.registry import METHODS
from sweeps import architectures, augmentations, lora_layers
from sweeps.service.console.terminal import headline
from sweeps.service.options.data import DataOptions
from sweeps.service.options.score_options import final_scores, scores_to_compare, visible_scores
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.augmentation_sets import combinations
from sweeps.service.planning.inputs import PlanInputs
from sweeps.service.planning.plan import SweepPlan
from sweeps.service.planning.search_plan import plan_search
from sweeps.service.planning.space import SearchOptions
from sweeps.service.planning.trials import Point
from sweeps.service.running.sweep import Outcome
from sweeps.service.running.two_stage_policy import _best_point, select_methods
from tests.sweeps.support import loaded, plan_of
from trainers.config.networks import TextViewConfig, ViewConfig
from trainers.config.presets import CPU, PAIRS_CPU
from trainers.config.training import ClipNetworkConfig
from trainers.config.tree import replace_options
from trainers.models.clip.published_models import SMALL_MODELS, ClipConfig, find_clip

RECALL = "image_to_text_recall_at_10"
QUICK = ("--dataset", "shapes:200", "--expected-batch-size", "64", "--num-steps", "2", "--repeats", "1")
QUICK += ("--noise-multiplier", "1", "--no-non-private")
SEALED = ("--release", "sealed", "--dataset", "shapes:200", "--evaluate-on", "shapes:100:7")


def given(kind: type[Any], *arguments: str) -> Any:
    """The options of one of the sweeps for a command line."""
    return parse_options(kind, description="", arguments=arguments)


def layers(*arguments: str) -> lora_layers.LoraLayersOptions:
    return given(lora_layers.LoraLayersOptions, *arguments)


def networks(*arguments: str) -> architectures.ArchitecturesOptions:
    return given(architectures.ArchitecturesOptions, *arguments)


def augmented(*arguments: str) -> augmentations.AugmentationsOptions:
    return given(augmentations.AugmentationsOptions, *arguments)


def planned(options: SweepOptions, points: list[Point]) -> SweepPlan:
    return plan_of("pairs", options, points, calibration_folder=None)


# Adapted layers


@pytest.mark.ci
def test_layers_of_a_plan_are_those_that_get_adapters() -> None:
    chosen = layers(*QUICK, "--layers", "K", "Q+V")
    found = {}
    for trial in planned(chosen, lora_layers.points(chosen)).trials:
        assert isinstance(trial.config.network, ClipNetworkConfig)
        found[trial.params["lora_layers"]] = trial.config.network.lora_targets
    assert found == {"K": ("k",), "Q+V": ("q", "v")}


@pytest.mark.parametrize(
    ("arguments", "rank"),
    [((), 4), (("--network", "ViT-B-32"), 16), (("--lora-rank", "2"), 2), (("--full",), 16)],
)
def test_layers_are_adapted_at_a_rank_that_fits_the_network(arguments: tuple[str, ...], rank: int) -> None:
    points = lora_layers.points(layers(*arguments))
    assert {point.changes["lora_rank"] for point in points} == {rank}


def test_layers_are_swept_private_and_not() -> None:
    epsilons = [point.changes.get("epsilon") for point in lora_layers.points(layers("--layers", "Q+V"))]
    assert epsilons == [None, math.inf]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--dataset", "digits"), "adapters need a CLIP model"), (("--layers", "Q+W"), "did you mean 'Q")],
)
def test_layers_refuse_what_has_none(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("+", r"\+")):
        lora_layers.points(layers(*arguments))


# Architectures


@pytest.mark.ci
def test_architectures_of_pairs_are_small_clip_models_unless_given() -> None:
    chosen = networks(*QUICK)
    plan = planned(chosen, architectures.points(chosen))
    assert [trial.config.network.name for trial in plan.trials] == list(architectures.OF_PAIRS)


def test_architectures_of_images_are_encoders_of_images() -> None:
    points = architectures.points(networks("--dataset", "digits", "--no-non-private"))
    assert [point.changes["network"] for point in points] == list(architectures.OF_IMAGES)


def test_architecture_is_given_with_its_own_weights() -> None:
    (point,) = architectures.points(networks("--networks", "ViT-B-32=/models/b32", "--no-non-private"))
    assert point.changes["warm_start"] == Path("/models/b32")
    assert point.changes["pretrained"] == "random"


def test_architecture_is_given_once_for_the_figure_names_it() -> None:
    with pytest.raises(ConfigError, match="must have different names"):
        architectures.points(networks("--networks", "clip-tiny", "clip-tiny=/models/tiny"))


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_small_models_read_the_same_images(name: str) -> None:
    assert find_clip(ClipConfig(model=name)).image_size == (32, 32)


# Augmentations


def test_augmentations_are_all_combinations_of_the_paper() -> None:
    points = augmentations.points(augmented("--no-non-private"))
    assert len({str(point.changes) for point in points}) == len(points) == 9


def test_augmentations_of_images_alone_have_no_captions() -> None:
    points = augmentations.points(augmented("--dataset", "digits", "--no-non-private"))
    assert [point.params["augmentation"] for point in points] == ["crop", "jitter", "blur"]
    assert not any("swap" in option for point in points for option in point.changes)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("crop", {"min_crop_area"}),  # up to the whole image, as without any
        ("jitter", {"brightness", "contrast", "saturation", "hue"}),
        ("blur", {"blur_prob"}),
        ("none", set()),
    ],
)
def test_augmentation_that_is_on_stands_alone(name: str, options: set[str]) -> None:
    (changes,) = combinations(PAIRS_CPU.views, PAIRS_CPU.text_views, [name], ["none"]).values()
    off = {"min_crop_area": 1.0, "max_crop_area": 1.0}
    views = replace_options(PAIRS_CPU, **changes).views
    every = ("min_crop_area", "max_crop_area", "brightness", "contrast", "saturation", "hue", "blur_prob")
    assert {each for each in every if getattr(views, each) != off.get(each, 0.0)} == options


def test_augmentation_has_the_strength_of_the_setting() -> None:
    (changes,) = combinations(
        ViewConfig(blur_prob=0.1), TextViewConfig(), ["crop+jitter+blur"], None
    ).values()
    views = replace_options(ViewConfig(blur_prob=0.1), **changes)
    names = ("min_crop_area", "max_crop_area", "flip_prob", "brightness", "saturation", "blur_prob")
    assert [getattr(views, name) for name in names] == [0.3, 1.0, 0.5, 0.4, 0.0, 0.1]


def test_flips_go_with_crops() -> None:
    (changes,) = combinations(CPU.views, CPU.text_views, ["jitter"], None).values()
    assert changes["flip_prob"] == 0


def test_text_augmentations_reach_the_training() -> None:
    chosen = augmented(*QUICK, "--image-augmentations", "crop", "--text-augmentations", "word_swap", "none")
    plan = planned(chosen, augmentations.points(chosen))
    found = {trial.params["augmentation"]: trial.config.text_views for trial in plan.trials}
    assert [dataclasses.astuple(views) for views in found.values() if views] == [(0, 0.3, 0), (0, 0, 0)]
    assert list(found) == ["crop, word swap", "crop, none"]


@pytest.mark.parametrize("name", ["crop+crop", "crop+jiter"])
def test_augmentations_refuse_names_that_are_none(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must name each augmentation once|did you mean 'jitter'"):
        combinations(CPU.views, CPU.text_views, [name], None)


def test_figures_know_the_order_of_what_is_swept() -> None:
    assert set(lora_layers.LAYERS) == set(ADAPTED_LAYERS)
    assert {*SMALL_MODELS, *architectures.ArchitecturesOptions().full().networks} <= set(NETWORKS)
    swept = augmentations.points(augmented()) + augmentations.points(augmented("--dataset", "digits"))
    assert {point.params["augmentation"] for point in swept} <= set(AUGMENTATIONS)


# What is scored


@pytest.mark.parametrize(("dataset", "score"), [("shapes:200", RECALL), ("digits", "knn_accuracy")])
def test_sealed_sweep_selects_by_the_score_of_its_modality(dataset: str, score: str) -> None:
    assert layers("--release", "sealed", "--dataset", dataset).release.select_by == score


@pytest.mark.parametrize("name", [f"{RECALL}_during", "knn_accuracy_during", f"untrained_{RECALL}", "snr"])
def test_sealed_sweep_selects_by_no_score_that_a_trial_never_ends_with(name: str) -> None:
    assert name not in final_scores()
    with pytest.raises(ConfigError, match="unknown score to select by"):
        layers(*SEALED, "--select-by", name)


def test_sealed_plan_refuses_a_score_that_its_data_do_not_give() -> None:
    chosen = layers(*QUICK[2:6], *SEALED, "--noise-multiplier", "1", "--select-by", "view_retrieval_top1")
    with pytest.raises(
        ConfigError, match=f"select_by must be a score of trials .*got 'view_retrieval_top1'.*{RECALL}"
    ):
        planned(chosen, [Point(label="one", changes={})])


def test_pairs_have_recalls_and_with_labels_those_of_labels() -> None:
    chosen = layers(*QUICK)
    data = planned(chosen, [Point(label="one", changes={})]).data
    assert visible_scores(data, "dp_gcl")[0] == RECALL
    assert visible_scores(data, "dp_cap")[0] == "caption_token_probability"
    assert RECALL not in visible_scores(data, "dp_cap")
    assert "knn_accuracy" in visible_scores(data, "dp_gcl")
    assert "view_retrieval_top1" not in visible_scores(data, "dp_gcl")
    assert data.index is not None
    unlabelled = dataclasses.replace(data, index=dataclasses.replace(data.index, labels=None))
    assert "knn_accuracy" not in visible_scores(unlabelled, "dp_gcl")
    for names in ((), ("circle", "square", "triangle", "diamond", "cross", "ring")):
        named = dataclasses.replace(data, class_names=names)
        assert ("zero_shot_accuracy" in visible_scores(named, "dp_gcl")) == bool(names)


def test_methods_of_several_kinds_are_tuned_by_a_score_that_all_have() -> None:
    chosen = layers(*QUICK)
    data = planned(chosen, [Point(label="one", changes={})]).data
    assert set(scores_to_compare(data, ["dp_gcl", "dp_clip"]).values()) == {RECALL}
    assert set(scores_to_compare(data, ["dp_gcl", "dp_cap", "dp_mae"]).values()) == {"knn_accuracy"}
    assert data.index is not None
    unlabelled = dataclasses.replace(data, index=dataclasses.replace(data.index, labels=None), class_names=())
    found = scores_to_compare(unlabelled, ["dp_gcl", "dp_cap", "dp_mae"])
    own = {"dp_gcl": RECALL, "dp_cap": "caption_token_probability", "dp_mae": "view_retrieval_top1"}
    assert found == own


def test_search_of_pairs_raises_their_recall_unless_told_otherwise(tmp_path: Path) -> None:
    arguments = (*QUICK[:4], "--num-steps", "2", "--noise-multiplier", "1")
    chosen = given(SearchOptions, *arguments)
    assert chosen.objectives == (RECALL,)
    assert (
        plan_search(
            PlanInputs(
                question="search",
                options=chosen,
                points=(),
                data=loaded(chosen)[0],
                calibration_folder=tmp_path,
            )
        ).params()["objective"]
        == RECALL
    )


def test_tuning_takes_the_setting_of_the_best_score() -> None:
    settings = [Point(label=f"s{k}", changes={"learning_rate": rate}) for k, rate in enumerate((0.1, 0.2))]
    scores = [{RECALL: 0.5, "knn_accuracy": 0.1}, {RECALL: 0.4, "knn_accuracy": 0.9}]
    results = {f"s{k}-r0": {"metrics": each} for k, each in enumerate(scores)}
    no_plan: Any = None
    tuning = Outcome(code=0, plan=no_plan, results=results)
    for score, rate in ((RECALL, 0.1), ("knn_accuracy", 0.2)):
        best = _best_point(settings, tuning, Point(label="c", changes={}), score)
        assert best.changes["learning_rate"] == rate


def test_line_of_a_trial_of_pairs_shows_recalls() -> None:
    metrics = {"knn_accuracy": 0.1, RECALL: 0.5, "text_to_image_recall_at_10": 0.4, "epsilon": 10.0}
    expected = [f"{RECALL} 0.5", "text_to_image_recall_at_10 0.4", "epsilon 10"]
    assert headline(metrics) == expected


# Methods


def test_comparison_of_pairs_has_the_methods_that_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = [method.name for method in select_methods((), DataOptions(dataset="shapes:200"))]
    assert found == [name for name, method in METHODS.items() if method.takes_pairs]
    assert "logit_dp" in capsys.readouterr().out


def test_comparison_of_images_has_the_methods_that_take_them(capsys: pytest.CaptureFixture[str]) -> None:
    found = [method.name for method in select_methods((), DataOptions())]
    unlabelled = [name for name, method in METHODS.items() if not method.takes_labels]
    assert found == [name for name in unlabelled if METHODS[name].takes_images]
    assert "no loss for images without texts: dp_cap" in capsys.readouterr().out


def test_comparison_of_pairs_refuses_a_method_that_is_named_and_takes_none() -> None:
    chosen = layers(*QUICK)
    (named,) = select_methods(("group_clip",), chosen.data)
    with pytest.raises(ConfigError, match="no loss for pairs"):
        planned(chosen, [Point(label="one", changes={"method": named.name})])
