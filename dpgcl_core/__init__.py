"""Differentially private contrastive learning: losses, groups, clipping, noise, accountants, ledger.

What is imported from here is the library's interface; everything else may change.

    from dpgcl_core import make_private

Neither Ray nor MLflow, Optuna or open_clip is imported. A name is loaded when it is asked for,
and the package's methods when the first method is looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpgcl_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from dpgcl_core.accounting.composition import (
        Calibration,
        calibrate_noise_multiplier,
        epsilon_of_steps,
        epsilon_pld,
        epsilon_rdp,
        poisson_gaussian_event,
    )
    from dpgcl_core.accounting.tuning.cost import TuningCost, open_cost, sealed_cost, sealed_threshold_cost
    from dpgcl_core.accounting.tuning.laws import (
        BinomialTrials,
        PoissonTrials,
        TrialCountLaw,
        TruncatedNegativeBinomial,
        TruncatedTrials,
    )
    from dpgcl_core.accounting.tuning.trials import TrialClass
    from dpgcl_core.clipping.clipper import GroupClipper
    from dpgcl_core.clipping.cross_record import refuse_cross_record
    from dpgcl_core.clipping.parts import ClippingParts
    from dpgcl_core.clipping.types import (
        GroupInputs,
        GroupReport,
        Objective,
        num_trainable,
        trainable_parameters,
    )
    from dpgcl_core.errors import (
        BudgetExceeded,
        ConfigError,
        DataError,
        DpgclError,
        LedgerError,
        StorageError,
        TrackingError,
    )
    from dpgcl_core.ledger.cap import Cap
    from dpgcl_core.ledger.ledger import Ledger
    from dpgcl_core.losses.byol import byol_group_loss
    from dpgcl_core.losses.image_text import image_text_group_loss, image_text_sigmoid_loss, interleaved
    from dpgcl_core.losses.info_nce import group_info_nce, symmetric_group_info_nce, two_view_group_loss
    from dpgcl_core.losses.objective import EmbeddingObjective, GroupLoss
    from dpgcl_core.losses.sigmoid import group_sigmoid, two_view_sigmoid_loss
    from dpgcl_core.mechanism.mechanism import Mechanism
    from dpgcl_core.mechanism.method import GradientRule, GroupRule, LossSettings, Method
    from dpgcl_core.mechanism.numbers import PublicNumbers, default_delta
    from dpgcl_core.mechanism.registry import METHODS, method_named, register
    from dpgcl_core.methods.in_groups import ClippedGroups, InGroups
    from dpgcl_core.noise.chacha20 import SecureRandomness
    from dpgcl_core.noise.gaussian import GaussianNoise
    from dpgcl_core.noise.sources import DrawSource, SecretRandomness, SeededNonPrivateRandomness
    from dpgcl_core.private_training import PrivateTraining, make_private
    from dpgcl_core.release.metrics import METRICS, Metric, Release, visible
    from dpgcl_core.release.statement import PrivacyStatement
    from dpgcl_core.sampling.groups import FixedSizeGroups, Grouper, WholeBatch
    from dpgcl_core.sampling.poisson import PoissonSampler
    from dpgcl_core.sampling.stage import DrawnGroups, GroupStage, SampledRecords, Sampler

__all__ = [
    "BinomialTrials",
    "BudgetExceeded",
    "Calibration",
    "Cap",
    "ClippedGroups",
    "ClippingParts",
    "ConfigError",
    "DataError",
    "DpgclError",
    "DrawSource",
    "DrawnGroups",
    "EmbeddingObjective",
    "FixedSizeGroups",
    "GaussianNoise",
    "GradientRule",
    "GroupClipper",
    "GroupInputs",
    "GroupLoss",
    "GroupReport",
    "GroupRule",
    "GroupStage",
    "Grouper",
    "InGroups",
    "Ledger",
    "LedgerError",
    "LossSettings",
    "METHODS",
    "METRICS",
    "Mechanism",
    "Method",
    "Metric",
    "Objective",
    "PoissonSampler",
    "PoissonTrials",
    "PrivacyStatement",
    "PrivateTraining",
    "PublicNumbers",
    "Release",
    "SampledRecords",
    "Sampler",
    "SecretRandomness",
    "SecureRandomness",
    "SeededNonPrivateRandomness",
    "StorageError",
    "TrackingError",
    "TrialClass",
    "TrialCountLaw",
    "TruncatedNegativeBinomial",
    "TruncatedTrials",
    "TuningCost",
    "WholeBatch",
    "byol_group_loss",
    "calibrate_noise_multiplier",
    "default_delta",
    "epsilon_of_steps",
    "epsilon_pld",
    "epsilon_rdp",
    "group_info_nce",
    "group_sigmoid",
    "image_text_group_loss",
    "image_text_sigmoid_loss",
    "interleaved",
    "make_private",
    "method_named",
    "num_trainable",
    "open_cost",
    "poisson_gaussian_event",
    "refuse_cross_record",
    "register",
    "sealed_cost",
    "sealed_threshold_cost",
    "symmetric_group_info_nce",
    "trainable_parameters",
    "two_view_group_loss",
    "two_view_sigmoid_loss",
    "visible",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "accounting.composition": (
            "Calibration",
            "calibrate_noise_multiplier",
            "epsilon_of_steps",
            "epsilon_pld",
            "epsilon_rdp",
            "poisson_gaussian_event",
        ),
        "accounting.tuning.cost": ("TuningCost", "open_cost", "sealed_cost", "sealed_threshold_cost"),
        "accounting.tuning.laws": (
            "BinomialTrials",
            "PoissonTrials",
            "TrialCountLaw",
            "TruncatedNegativeBinomial",
            "TruncatedTrials",
        ),
        "accounting.tuning.trials": ("TrialClass",),
        "clipping.clipper": ("GroupClipper",),
        "clipping.cross_record": ("refuse_cross_record",),
        "clipping.parts": ("ClippingParts",),
        "clipping.types": (
            "GroupInputs",
            "GroupReport",
            "Objective",
            "num_trainable",
            "trainable_parameters",
        ),
        "errors": (
            "BudgetExceeded",
            "ConfigError",
            "DataError",
            "DpgclError",
            "LedgerError",
            "StorageError",
            "TrackingError",
        ),
        "ledger.cap": ("Cap",),
        "ledger.ledger": ("Ledger",),
        "losses.byol": ("byol_group_loss",),
        "losses.image_text": ("image_text_group_loss", "image_text_sigmoid_loss", "interleaved"),
        "losses.info_nce": ("group_info_nce", "symmetric_group_info_nce", "two_view_group_loss"),
        "losses.objective": ("EmbeddingObjective", "GroupLoss"),
        "losses.sigmoid": ("group_sigmoid", "two_view_sigmoid_loss"),
        "mechanism.mechanism": ("Mechanism",),
        "mechanism.method": ("GradientRule", "GroupRule", "LossSettings", "Method"),
        "mechanism.numbers": ("PublicNumbers", "default_delta"),
        "mechanism.registry": ("METHODS", "method_named", "register"),
        "methods.in_groups": ("ClippedGroups", "InGroups"),
        "noise.chacha20": ("SecureRandomness",),
        "noise.gaussian": ("GaussianNoise",),
        "noise.sources": ("DrawSource", "SecretRandomness", "SeededNonPrivateRandomness"),
        "private_training": ("PrivateTraining", "make_private"),
        "release.metrics": ("METRICS", "Metric", "Release", "visible"),
        "release.statement": ("PrivacyStatement",),
        "sampling.groups": ("FixedSizeGroups", "Grouper", "WholeBatch"),
        "sampling.poisson": ("PoissonSampler",),
        "sampling.stage": ("DrawnGroups", "GroupStage", "SampledRecords", "Sampler"),
    },
)
