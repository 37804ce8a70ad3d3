"""Differentially private contrastive learning: losses, groups, clipping, noise, accountants, ledger.

The names in this module are the library's interface; everything else may change.

    from dpgcl_core import make_private

This module imports none of Ray, MLflow, Optuna and open_clip. A name is loaded when it is first used,
and the package's methods are loaded when the first method is looked up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpgcl_core.lazy_names import lazy_names

if TYPE_CHECKING:
    from dpgcl_core.accounting.composition import Calibration as Calibration
    from dpgcl_core.accounting.composition import calibrate_noise_multiplier as calibrate_noise_multiplier
    from dpgcl_core.accounting.composition import epsilon_of_steps as epsilon_of_steps
    from dpgcl_core.accounting.composition import epsilon_pld as epsilon_pld
    from dpgcl_core.accounting.composition import epsilon_rdp as epsilon_rdp
    from dpgcl_core.accounting.composition import poisson_gaussian_event as poisson_gaussian_event
    from dpgcl_core.accounting.tuning.cost import TuningCost as TuningCost
    from dpgcl_core.accounting.tuning.cost import open_cost as open_cost
    from dpgcl_core.accounting.tuning.cost import sealed_cost as sealed_cost
    from dpgcl_core.accounting.tuning.cost import sealed_threshold_cost as sealed_threshold_cost
    from dpgcl_core.accounting.tuning.laws import BinomialTrials as BinomialTrials
    from dpgcl_core.accounting.tuning.laws import PoissonTrials as PoissonTrials
    from dpgcl_core.accounting.tuning.laws import TrialCountLaw as TrialCountLaw
    from dpgcl_core.accounting.tuning.laws import TruncatedNegativeBinomial as TruncatedNegativeBinomial
    from dpgcl_core.accounting.tuning.laws import TruncatedTrials as TruncatedTrials
    from dpgcl_core.accounting.tuning.trial_release import TrialClass as TrialClass
    from dpgcl_core.clipping.clipper import GroupClipper as GroupClipper
    from dpgcl_core.clipping.cross_record import refuse_cross_record as refuse_cross_record
    from dpgcl_core.clipping.full_precision import is_low_precision_off as is_low_precision_off
    from dpgcl_core.clipping.parts import ClippingParts as ClippingParts
    from dpgcl_core.clipping.types import GroupInputs as GroupInputs
    from dpgcl_core.clipping.types import GroupReport as GroupReport
    from dpgcl_core.clipping.types import Objective as Objective
    from dpgcl_core.clipping.types import num_trainable as num_trainable
    from dpgcl_core.clipping.types import trainable_parameters as trainable_parameters
    from dpgcl_core.errors import BudgetExceeded as BudgetExceeded
    from dpgcl_core.errors import ConfigError as ConfigError
    from dpgcl_core.errors import DataError as DataError
    from dpgcl_core.errors import DpgclError as DpgclError
    from dpgcl_core.errors import LedgerError as LedgerError
    from dpgcl_core.errors import StorageError as StorageError
    from dpgcl_core.errors import TrackingError as TrackingError
    from dpgcl_core.ledger.cap import Cap as Cap
    from dpgcl_core.ledger.ledger import Ledger as Ledger
    from dpgcl_core.losses.byol import byol_group_loss as byol_group_loss
    from dpgcl_core.losses.image_text import image_text_group_loss as image_text_group_loss
    from dpgcl_core.losses.image_text import image_text_sigmoid_loss as image_text_sigmoid_loss
    from dpgcl_core.losses.image_text import interleaved as interleaved
    from dpgcl_core.losses.info_nce import group_info_nce as group_info_nce
    from dpgcl_core.losses.info_nce import symmetric_group_info_nce as symmetric_group_info_nce
    from dpgcl_core.losses.info_nce import two_view_group_loss as two_view_group_loss
    from dpgcl_core.losses.objective import EmbeddingObjective as EmbeddingObjective
    from dpgcl_core.losses.objective import GroupLoss as GroupLoss
    from dpgcl_core.losses.sigmoid import group_sigmoid as group_sigmoid
    from dpgcl_core.losses.sigmoid import two_view_sigmoid_loss as two_view_sigmoid_loss
    from dpgcl_core.mechanism.mechanism import Mechanism as Mechanism
    from dpgcl_core.mechanism.method import GradientRule as GradientRule
    from dpgcl_core.mechanism.method import LossSettings as LossSettings
    from dpgcl_core.mechanism.method import Method as Method
    from dpgcl_core.mechanism.numbers import PublicNumbers as PublicNumbers
    from dpgcl_core.mechanism.numbers import default_delta as default_delta
    from dpgcl_core.mechanism.registry import METHODS as METHODS
    from dpgcl_core.mechanism.registry import method_named as method_named
    from dpgcl_core.mechanism.registry import register as register
    from dpgcl_core.methods.in_groups import ClippedGroups as ClippedGroups
    from dpgcl_core.methods.in_groups import InGroups as InGroups
    from dpgcl_core.noise.chacha20 import SecureRandomness as SecureRandomness
    from dpgcl_core.noise.gaussian import GaussianNoise as GaussianNoise
    from dpgcl_core.noise.randomness import DrawSource as DrawSource
    from dpgcl_core.noise.randomness import SecretRandomness as SecretRandomness
    from dpgcl_core.noise.randomness import SeededNonPrivateRandomness as SeededNonPrivateRandomness
    from dpgcl_core.private_training import PrivateTraining as PrivateTraining
    from dpgcl_core.private_training import make_private as make_private
    from dpgcl_core.release.metrics import METRICS as METRICS
    from dpgcl_core.release.metrics import Metric as Metric
    from dpgcl_core.release.metrics import Release as Release
    from dpgcl_core.release.metrics import visible as visible
    from dpgcl_core.release.statement import PrivacyStatement as PrivacyStatement
    from dpgcl_core.sampling.groups import FixedSizeGroups as FixedSizeGroups
    from dpgcl_core.sampling.groups import Grouper as Grouper
    from dpgcl_core.sampling.groups import WholeBatch as WholeBatch
    from dpgcl_core.sampling.poisson import PoissonSampler as PoissonSampler
    from dpgcl_core.sampling.stage import DrawnGroups as DrawnGroups
    from dpgcl_core.sampling.stage import GroupStage as GroupStage
    from dpgcl_core.sampling.stage import SampledRecords as SampledRecords
    from dpgcl_core.sampling.stage import Sampler as Sampler

__getattr__, __dir__, __all__ = lazy_names(__name__)
