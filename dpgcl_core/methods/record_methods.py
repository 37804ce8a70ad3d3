"""Methods that clip each record's own gradient: masked auto-encoding, captioning, classification.

Each loss of these methods depends on only one record: no other record of the step is its negative, its target
or its normaliser. So each record is its own group, and the clipped sum of a step is f(B) = Σ_{i∈B} g_i with
‖g_i‖ ≤ C, where g_i is a function of only record i, the iterate and public randomness.

**Proposition.** Adding or removing one record moves f by at most C.

*Proof.* Let D' = D ∪ {r}. Each record joins the sample by its own independent coin, so the samples of D and
D' can be coupled to agree except for r. Given the coupling, f(B') − f(B) is g_r if r was sampled and 0 if
it was not; no other term moves, because no other term depends on r. ∎

The step is then the Poisson-subsampled Gaussian of (q, σ) with sensitivity C for adding or removing one
record (docs/theory/groups.md). If groups are sampled, a slot is a group, and an empty slot contributes
zero: `dpgcl_core.sampling.slots` proves the same bound. The argument fails with a mask or a padded token that
depends on which other records were drawn, with a loss averaged over the tokens of the whole batch, and with
statistics across records.

A classifier's record is an image with its label, and g_i is a function of both. Adding or removing a record
adds or removes both, so C covers the label as it covers the image. The argument also fails with labels
numbered by their position among the classes of the private data, which one more record can shift for all
others, and with class weights computed from the frequencies of the labels.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpgcl_core.errors import ConfigError
from dpgcl_core.mechanism.numbers import GROUPS, RECORDS, PublicNumbers, Sampled
from dpgcl_core.methods.in_groups import ClippedGroups


@dataclass(frozen=True, kw_only=True)
class PerRecord(ClippedGroups):
    """A method that clips each record's gradient to C, with the objective of one task."""

    clip_unit: str = "record"
    samplings: tuple[Sampled, ...] = (RECORDS, GROUPS)
    takes_group_size: bool = False
    one_record_groups: bool = True
    min_group_size: int = 1
    takes_augmented_keys: bool = False
    takes_temperature: bool = False

    def check(self, numbers: PublicNumbers) -> None:
        super().check(numbers)
        if numbers.group_size != 1:
            raise ConfigError(
                f"{self.name} clips each record separately, so group_size must be 1; got {numbers.group_size}"
            )


DP_MAE = PerRecord(
    name="dp_mae",
    title="Masked auto-encoder",
    source="ViP (Yu et al. 2023)",
    task="masked-images",
)
DP_CAP = PerRecord(
    name="dp_cap",
    title="Captioner",
    source="DP-Cap (Sander et al. 2024), Eq. 3",
    task="captions",
    takes_images=False,
)
DP_CLASSIFIER = PerRecord(
    name="dp_classifier",
    title="Classifier",
    source="DP-SGD (Abadi et al. 2016); De et al. 2022",
    task="classes",
    takes_pairs=False,
    takes_labels=True,
)
