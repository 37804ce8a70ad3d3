#!/usr/bin/env python
"""Membership inference on trained encoders, with and without privacy.

    python benchmarks/membership.py
    python benchmarks/membership.py --dataset fashion-mnist --num-steps 2000
    python benchmarks/membership.py --epsilon 1 --json

A non-private and a private encoder are trained on the same few records. The attacker has the encoder and a
record, and decides whether the encoder was trained on it. Contrastive training pulls the views of a training
record together, so the score is the mean cosine similarity between the embeddings of many fresh views of the
record (EncoderMI; Liu et al. 2021). The report has the true positive rate at a false positive rate of 1 %
(TPR at 1 % FPR, as in DP-GCL's Table 12), and the area under the ROC curve.

A weak attack also gives low rates, so they do not prove privacy: the guarantee is ε. Members and non-members
are a random split of one public source, so they differ only by the training. Only built-in data sets are
allowed, because the attack reads single records, and one of the encoders is not private.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmarks.harness import aligned
from benchmarks.steps import unscored_data
from dpgcl_core.command_line import run_command
from dpgcl_core.errors import ConfigError, DataError, exit_on_bad_input, require_least, require_positive
from trainers.config.networks import NetworkConfig, NetworkOptions, ViewConfig
from trainers.config.nodes import ObjectiveConfig, OptimizerConfig
from trainers.config.settings import TrainingOptions
from trainers.config.training import TrainingConfig
from trainers.config.tree import replace_options
from trainers.data.dataset import image_shape_of
from trainers.data.dataset_registry import BUILTIN_DATASETS
from trainers.data.loading import check_dataset_name, load_dataset, modality_of_name
from trainers.data.records import Records
from trainers.evaluation.features import first_by_hash, frozen
from trainers.models.encoder import Encoder, build_encoder
from trainers.tasks.task import image_views
from trainers.training.loop import train
from trainers.training.resolve import training_config

Scores = NDArray[np.float64]

ATTACK_STEP = -2
"""The step in the key of the views; no training step and no other evaluation uses it."""

MAX_FALSE_POSITIVE_RATE = 0.01
_CONFIDENCE = 0.95
_RECORDS_AT_ONCE = 128


# On digits, these settings make the non-private encoder memorise. Strong views or few steps hide the effect.
REMEMBERING = TrainingOptions(
    objective=ObjectiveConfig(temperature=0.1),
    views=ViewConfig(min_crop_area=0.8, flip_prob=0.0, brightness=0.0, contrast=0.0),
    network=NetworkOptions(name="small_cnn", embedding_dim=16),
    optimizer=OptimizerConfig(learning_rate=3e-3),
)


@dataclass(frozen=True, kw_only=True)
class AttackResult:
    """How well an attack distinguishes members from non-members.

    Attributes:
      true_positive_rate: share of members above the threshold, which at most 1 % of non-members exceed.
      lowest_true_positive_rate, highest_true_positive_rate: 95 % Clopper-Pearson interval at this threshold.
      false_positive_rate: share of non-members above the threshold.
      auc: probability that a member scores above a non-member; 0.5 is chance level.
      num_members, num_non_members: numbers of records scored.
    """

    true_positive_rate: float
    lowest_true_positive_rate: float
    highest_true_positive_rate: float
    false_positive_rate: float
    auc: float
    num_members: int
    num_non_members: int


def attack(member_scores: Scores, non_member_scores: Scores) -> AttackResult:
    """Return the rates of the attack that calls a record a member if it scores above a threshold.

    The threshold is the lowest that at most 1 % of the non-members exceed. It is chosen on these non-members;
    an attacker with good shadow models would come close to it. Ties count as non-members in the rates and as
    one half in the area, so an encoder that maps everything to one point gives 0 and 0.5.

    Args:
      member_scores: `[num_members]`.
      non_member_scores: `[num_non_members]`.

    Raises:
      DataError: there are no members, or fewer than 100 non-members, which are needed for a rate of 1 %.

    >>> found = attack(np.arange(100.0) + 50, np.arange(100.0))
    >>> found.true_positive_rate, found.false_positive_rate, found.auc
    (0.51, 0.01, 0.875)
    """
    members, non_members = len(member_scores), len(non_member_scores)
    if members == 0 or non_members < round(1 / MAX_FALSE_POSITIVE_RATE):
        raise DataError(
            "TPR at 1 % FPR needs at least one member and 100 non-members; "
            f"got {members} and {non_members}. Use a larger data set or fewer members"
        )
    num_allowed = math.floor(MAX_FALSE_POSITIVE_RATE * non_members + 1e-9)
    threshold = np.sort(non_member_scores)[non_members - num_allowed - 1]
    num_accused = int((member_scores > threshold).sum())
    interval = stats.binomtest(num_accused, members).proportion_ci(_CONFIDENCE, method="exact")
    ranks = stats.rankdata(np.concatenate([member_scores, non_member_scores]))[:members]
    return AttackResult(
        true_positive_rate=num_accused / members,
        lowest_true_positive_rate=float(interval.low),
        highest_true_positive_rate=float(interval.high),
        false_positive_rate=float((non_member_scores > threshold).mean()),
        auc=float((ranks.sum() - members * (members + 1) / 2) / (members * non_members)),
        num_members=members,
        num_non_members=non_members,
    )


def view_alignment(encoder: Encoder, records: Records, config: TrainingConfig, *, num_views: int) -> Scores:
    """Return each record's mean cosine similarity between its views' embeddings, `[num_records]`.

    The views are fresh draws of the training's augmentation. A record's score depends only on the record and
    the encoder. Embeddings that are not finite count as zero.

    Args:
      encoder: the network, on any device; its modes are restored.
      records: the records to score.
      config: the augmentation, and the public seed of the views.
      num_views: number of views, at least 2; more views give a more stable score.
    """
    scores = [np.zeros(0)]
    with frozen(encoder):
        for start in range(0, len(records), _RECORDS_AT_ONCE):
            rows = np.arange(start, min(start + _RECORDS_AT_ONCE, len(records)))
            pixels, ids = records.images[rows], records.ids[rows]
            views = image_views(config, encoder, pixels, ids, step=ATTACK_STEP, num_views=num_views)
            embedded = encoder(views.flatten(0, 1)).double().nan_to_num(0, 0, 0)
            scores.append(_mean_similarity(embedded.unflatten(0, views.shape[:2])))
    return np.concatenate(scores)


def _mean_similarity(embedded: Tensor) -> Scores:
    """Return the mean similarity of different views, `[records]`, of embeddings `[records, views, dim]`."""
    unit = F.normalize(embedded, dim=2, eps=1e-6)
    num_views = unit.shape[1]
    of_pairs = unit.sum(1).square().sum(1) - unit.square().sum((1, 2))
    mean: Scores = (of_pairs / (num_views * (num_views - 1))).cpu().numpy()
    return mean


@dataclass(frozen=True, kw_only=True)
class MembershipOptions:
    """Options of the attack and of the trainings that it attacks.

    Attributes:
      dataset: a built-in data set of images.
      epsilon: ε of the private encoder.
      num_members: number of training records; few records are memorised best.
      num_steps: number of steps of each training.
      expected_batch_size: expected number of records per step.
      group_size: S of both trainings.
      num_views: fresh views per record for the attack.
      public_seed: seed of the split, initialisation and views.
      json: print one JSON object.
    """

    dataset: str = "digits"
    epsilon: float = 10.0
    num_members: int = 100
    num_steps: int = 2000
    expected_batch_size: float = 100
    group_size: int = 16
    num_views: int = 16
    public_seed: int = 0
    json: bool = False

    def __post_init__(self) -> None:
        check_dataset_name(self.dataset)
        if self.dataset not in BUILTIN_DATASETS:
            raise ConfigError(
                f"membership inference cannot run on data of your own; got {self.dataset!r}. It trains "
                "without privacy and reads single records. Use a built-in data set of images, such as digits"
            )
        if modality_of_name(self.dataset) == "image-text":
            raise ConfigError(
                "membership inference compares views of one image, and does not support image-text pairs; "
                f"got {self.dataset}. Use a data set of images, such as digits"
            )
        require_positive(self, "epsilon")
        require_least(self, 1, "num_members", "num_steps")
        require_least(self, 2, "num_views")


def infer_membership(options: MembershipOptions) -> dict[str, AttackResult]:
    """Return the attack's results on the untrained, the private and the non-private encoder, by name.

    The untrained encoder is the control: its results are due to chance.

    Raises:
      ConfigError: an option breaks a rule.
      DataError: the data set has too few records.
    """
    members, others = _members_and_others(options)
    base = replace_options(
        REMEMBERING,
        num_steps=options.num_steps,
        expected_batch_size=options.expected_batch_size,
        group_size=options.group_size,
        epsilon=options.epsilon,
        also_untrained=False,
        record_every_steps=0,
    )
    config = training_config(base, num_records=len(members), public_seed=options.public_seed)
    assert isinstance(config.network, NetworkConfig)  # only images are allowed
    encoders = {
        "untrained": build_encoder(config.network, image_shape_of(members), options.public_seed),
        "private": _train_encoder(base, members, options),
        "non-private": _train_encoder(replace_options(base, epsilon=math.inf), members, options),
    }
    attacks = {}
    for name, encoder in encoders.items():
        member_scores, other_scores = (
            view_alignment(encoder, records, config, num_views=options.num_views)
            for records in (members, others)
        )
        attacks[name] = attack(member_scores, other_scores)
    return attacks


def _train_encoder(setting: TrainingOptions, members: Records, options: MembershipOptions) -> Encoder:
    config = training_config(setting, num_records=len(members), public_seed=options.public_seed)
    encoder = train(config, unscored_data(members)).encoder
    assert isinstance(encoder, Encoder)
    return encoder


def _members_and_others(options: MembershipOptions) -> tuple[Records, Records]:
    """Return members and non-members: the distinct training images, split by a keyed hash."""
    records = load_dataset(options.dataset).train
    assert isinstance(records, Records)  # as the name says
    _, firsts = np.unique([image.tobytes() for image in np.asarray(records.images)], return_index=True)
    records = records.take(np.sort(firsts))
    order = first_by_hash(records.ids, len(records), seed=options.public_seed)
    if len(records) < options.num_members + 100:
        raise DataError(
            f"at least 100 non-members are needed; got {len(records)} different records, of which "
            f"{options.num_members} are members. Use a smaller num_members"
        )
    most = options.num_members + max(10_000, options.num_members)
    return records.take(order[: options.num_members]), records.take(order[options.num_members : most])


def table(attacks: dict[str, AttackResult], epsilon: float) -> str:
    """Return one row for each encoder."""
    head = ("encoder", "TPR at 1 % FPR", "95 % interval", "AUC", "members", "non-members")
    rows = [head] + [
        (
            f"{name}, ε = {epsilon:g}" if name == "private" else name,
            f"{100 * each.true_positive_rate:.1f} %",
            f"{100 * each.lowest_true_positive_rate:.1f} to {100 * each.highest_true_positive_rate:.1f} %",
            f"{each.auc:.3f}",
            str(each.num_members),
            str(each.num_non_members),
        )
        for name, each in attacks.items()
    ]
    return "\n".join(aligned(rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0.

    Raises:
      ConfigError: an option is unknown or breaks a rule, or the data are private.
      DataError: the data set is missing or too small.
    """
    options: MembershipOptions = run_command(
        MembershipOptions, prog="python benchmarks/membership.py", description=__doc__, arguments=arguments
    )
    attacks = infer_membership(options)
    if options.json:
        settings = {name: value for name, value in dataclasses.asdict(options).items() if name != "json"}
        rates = {name: dataclasses.asdict(each) for name, each in attacks.items()}
        print(json.dumps(settings | {"attacks": rates}))
    else:
        print(table(attacks, options.epsilon))
    return 0


if __name__ == "__main__":
    exit_on_bad_input(main)
