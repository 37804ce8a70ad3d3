"""Options from a file: the same as from the command line, strictly read, and written by every sweep."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from dpgcl_core.errors import ConfigError
from sweeps.ablation import AblationOptions
from sweeps.architectures import ArchitecturesOptions
from sweeps.augmentations import AugmentationsOptions
from sweeps.batch_size import BatchSizeOptions
from sweeps.clip_norm import ClipNormOptions
from sweeps.convergence import ConvergenceOptions
from sweeps.group_size import GroupSizeOptions
from sweeps.lora_layers import LoraLayersOptions
from sweeps.methods import MethodsOptions
from sweeps.noise_multiplier import NoiseMultiplierOptions
from sweeps.num_augmentations import NumAugmentationsOptions
from sweeps.privacy_budget import PrivacyBudgetOptions
from sweeps.service.options.options_file import options_text
from sweeps.service.options.sweep_command_line import parse_options
from sweeps.service.options.sweep_options import SweepOptions
from sweeps.service.planning.space import SearchOptions
from sweeps.temperature import TemperatureOptions
from sweeps.transfer import TransferOptions
from trainers.config.tree import leaves, replace_options, values_of

KINDS: list[type[SweepOptions]] = [
    AblationOptions,
    ArchitecturesOptions,
    AugmentationsOptions,
    BatchSizeOptions,
    ClipNormOptions,
    ConvergenceOptions,
    GroupSizeOptions,
    LoraLayersOptions,
    MethodsOptions,
    NoiseMultiplierOptions,
    NumAugmentationsOptions,
    PrivacyBudgetOptions,
    SearchOptions,
    TemperatureOptions,
    TransferOptions,
]
Read = Callable[..., GroupSizeOptions]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """The options of the group-size sweep for a file's content and a command line."""

    def parse(content: str, *arguments: str) -> GroupSizeOptions:
        file = tmp_path / "options.yaml"
        file.write_text(content, encoding="utf-8")
        return parse_options(GroupSizeOptions, description="", arguments=["--config", str(file), *arguments])

    return parse


@pytest.mark.parametrize("kind", KINDS)
def test_command_line_file_and_python_have_the_same_defaults(
    kind: type[SweepOptions], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.yaml"
    empty.write_text("version: 1\n")
    of_file = parse_options(kind, description="", arguments=["--config", str(empty)])
    of_line = parse_options(kind, description="", arguments=["--setting", "cpu"])
    assert values_of(of_file) == values_of(kind().completed(()))
    assert values_of(of_line) == values_of(kind().of_dataset().completed(()))


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_described_once(kind: type[SweepOptions]) -> None:
    assert [name for name, leaf in leaves(kind).items() if not leaf.help] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arguments", [[], ["--tiny"], ["--full", "--seed", "3", "--momentum", "0.5"]])
def test_file_of_a_sweep_repeats_its_options(
    kind: type[SweepOptions], arguments: list[str], tmp_path: Path
) -> None:
    chosen = parse_options(kind, description="", arguments=arguments)
    file = tmp_path / "config.yaml"
    file.write_text(options_text(chosen), encoding="utf-8")
    assert parse_options(kind, description="", arguments=["--config", str(file)]) == chosen


def test_file_holds_every_kind_of_value(read: Read) -> None:
    chosen = replace_options(
        GroupSizeOptions(),
        epsilon=float("inf"),
        warm_start=Path("/models/public"),
        secure_noise=True,
        lora_targets=("q", "out"),
        learning_rate=1e-5,
        csv_separator=",",
        dataset="csv:pairs of mine.csv",
        optimizer="sgd",
        network="tiny_cnn",
        group_sizes=(2, "batch"),
        non_private=False,
    )
    assert read(options_text(chosen)) == chosen


def test_file_of_a_sweep_says_nothing_of_places_and_passwords() -> None:
    chosen = replace_options(
        GroupSizeOptions(),
        storage=Path("/data/place"),
        tracking_uri="https://me:secret@server",
        ledger="postgresql://me:secret@server/ledger",
        dataset_id="scans",
        name="mine",
        resume=True,
        dry_run=True,
    )
    text = options_text(chosen)
    assert yaml.safe_load(text)["ledger"] == {"dataset_id": "scans"}
    named = ("secret", "place", "mine", "resume", "dry_run")
    assert not [word for word in named if word in text]


@pytest.mark.parametrize(
    ("section", "name", "value", "instead"),
    [
        ("service", "notify", "mail me", "docs/cluster.md"),
        ("storage", "publish_to", "s3://bucket/x", "--artifacts-destination"),
    ],
)
def test_removed_option_is_refused_unless_it_says_nothing(
    section: str, name: str, value: str, instead: str, read: Read
) -> None:
    assert read(f"version: 1\n{section}: {{{name}: null}}\n") == GroupSizeOptions()
    flag = "--" + name.replace("_", "-")
    for content, words in (
        (f"version: 1\n{section}: {{{name}: '{value}'}}\n", ()),
        ("version: 1\n", (flag, value)),
    ):
        with pytest.raises(ConfigError) as refused:
            read(content, *words)
        said = str(refused.value)
        assert re.split(" is | was ", said)[0].endswith(flag if words else f"{section}.{name}")
        assert "removed in 0.2.0: use " in said
        assert instead in said
        assert value not in said


def test_command_line_wins_over_the_file(read: Read) -> None:
    content = "version: 1\nmechanism: {num_steps: 7, epsilon: 3.0}\nservice: {repeats: 5}\n"
    chosen = read(content, "--num-steps", "9")
    assert (chosen.mechanism.num_steps, chosen.mechanism.epsilon, chosen.service.repeats) == (9, 3.0, 5)


@pytest.mark.parametrize(
    ("told", "given", "left"),
    [
        ("mechanism: {noise_multiplier: 2.0}", ("--epsilon", "3"), {"noise_multiplier": None}),
        ("mechanism: {epsilon: 2.0}", ("--noise-multiplier", "3"), {"epsilon": None}),
        ("mechanism: {sampling_prob: 0.1}", ("--expected-batch-size", "64"), {"sampling_prob": None}),
        ("network: {pretrained: openai}", ("--warm-start", "/x"), {"pretrained": "random"}),
    ],
)
def test_option_given_in_place_of_the_files_one_replaces_it(
    told: str, given: tuple[str, ...], left: dict[str, object], read: Read
) -> None:
    values = values_of(read(f"version: 1\n{told}\n", *given))
    assert {name: values[name] for name in left} == left


def test_file_may_start_from_a_named_setting(read: Read) -> None:
    chosen = read("version: 1\nsetting: auto\ndata: {dataset: shapes}\nmechanism: {num_steps: 7}\n")
    assert chosen.network.name == "clip-tiny"
    assert chosen.mechanism.num_steps == 7


def test_file_may_be_json(read: Read) -> None:
    content = {"version": 1, "optimizer": {"name": "sgd", "learning_rate": 1e-5}, "group_sizes": [4, "batch"]}
    chosen = read(json.dumps(content, indent=1))
    assert (chosen.optimizer.name, chosen.optimizer.learning_rate) == ("sgd", 1e-5)
    assert chosen.group_sizes == (4, "batch")


def test_exponents_without_a_point_are_numbers(read: Read) -> None:
    assert read("version: 1\noptimizer: {learning_rate: 1e-3}\n").optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("mechanism: {num_steps: 7}", "version must be 1, because other versions have other keys; got none"),
        ("version: 2", "version must be 1, because other versions have other keys; got 2"),
        (
            "version: 1\nmechanism: {num_stps: 7}",
            "unknown key 'mechanism.num_stps'; did you mean 'mechanism.n",
        ),
        ("version: 1\nmechanisms: {num_steps: 7}", "unknown key 'mechanisms'; did you mean 'mechanism'?"),
        ("version: 1\nnum_steps: 7", "unknown key 'num_steps'; did you mean 'mechanism.num_steps'?"),
        (
            "version: 1\ndata: {pairs: {imag: x}}",
            "unknown key 'data.pairs.imag'; did you mean 'data.pairs.im",
        ),
        ("version: 1\noptimizer: {optimizer: sgd}", "did you mean 'optimizer.name'?"),
        (
            "version: 1\nmechanism: {num_steps: many}",
            "mechanism.num_steps has an invalid value: Input should be a valid",
        ),
        ("version: 1\nmechanism: {num_steps: 7.0}", "mechanism.num_steps has an invalid value"),
        ("version: 1\nmechanism: {num_steps: true}", "mechanism.num_steps has an invalid value"),
        ("version: 1\nservice: {dry_run: 1}", "service.dry_run has an invalid value"),
        (
            "version: 1\ndata: {data_is: secret}",
            "data.data_is has an invalid value: Input should be 'auto', 'public'",
        ),
        ("version: 1\ngroup_sizes: 4", "group_sizes has an invalid value"),
        ("version: 1\ngroup_sizes: [4, all]", "group_sizes has an invalid value"),
        ("version: 1\nmechanism: 7", "mechanism must be a section of options by name; got 7"),
        ("version: 1\nsetting: 7", "setting must be the name of a setting; got 7"),
        ("version: 1\nsetting: papr", "unknown setting 'papr'; did you mean 'paper'"),
        ("version: 1\nmechanism: {num_steps: 0x}", "mechanism.num_steps has an invalid value"),
        (
            "version: 1\nmechanism: {epsilon: 1}\nmechanism: {epsilon: 2}",
            "the key 'mechanism' occurs twice",
        ),
        ("version: 1\nmechanism: {epsilon: [", "must be YAML or JSON"),
        ("- version", "must hold the key version, and sections of options"),
        ("", "must hold the key version, and sections of options"),
        ("version: 1\nmechanism: {epsilon: 3.0, noise_multiplier: 1.0}", "not both; got epsilon = 3.0"),
        ("version: 1\nservice: {repeats: 0}", "repeats must be at least 1; got 0"),
    ],
)
def test_bad_file_is_refused_with_the_key_and_the_nearest_right_one(
    content: str, words: str, read: Read
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(content)
    assert words in " ".join(str(caught.value).split())


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read"):
        parse_options(GroupSizeOptions, description="", arguments=["--config", str(tmp_path / "none.yaml")])


@pytest.mark.parametrize(
    "said",
    [
        "data: {dataset: 'npz:a.npz', data_is: public, unit_column: patient}",
        "data: {data_is: public}",
        "data: {dataset: 'npz:a.npz'}\nledger: {no_ledger: true, dataset_id: a}",
        "data: {dataset: 'npz:a.npz'}\nmechanism: {num_records_public: 100000, delta: 1.0e-6}",
    ],
)
def test_what_a_file_says_of_its_data_set_does_not_carry_over_to_another(read: Read, said: str) -> None:
    options = read(f"version: 1\n{said}\n", "--dataset", "npz:b.npz")
    assert options.data.are_private
    assert options.data.unit_column is None
    assert (options.ledger.no_ledger, options.ledger.dataset_id) == (False, None)
    assert (options.mechanism.num_records_public, options.mechanism.delta) == (None, None)


def test_file_that_names_its_data_set_may_declare_it_public(read: Read) -> None:
    content = "version: 1\ndata: {dataset: 'npz:a.npz', data_is: public}\n"
    assert not read(content).data.are_private
    assert not read(content, "--dataset", "npz:a.npz").data.are_private


def test_training_without_a_ledger_is_said_anew(read: Read) -> None:
    options = replace_options(GroupSizeOptions(), dataset="npz:a.npz", no_ledger=True)
    assert not read(options_text(options)).ledger.no_ledger


@pytest.mark.parametrize(
    "content",
    [
        "version: 1\nledger: {ledger: ['postgresql://u:S3CRET@h/db']}",
        "version: 1\nledger: {url: ['postgresql://u:S3CRET@h/db']}",
        "version: 1\nledger: {ledger: 'postgresql://u:S3CRET@h/db}",
        "version: 1\nstorage: {tracking_uri: [S3CRET]}",
    ],
)
def test_no_message_repeats_what_may_be_a_password(read: Read, content: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(content)
    assert "S3CRET" not in str(caught.value)


@pytest.mark.parametrize("version", ["true", "1.0", "'1'"])
def test_version_is_a_whole_number(read: Read, version: str) -> None:
    with pytest.raises(ConfigError, match="version must be 1"):
        read(f"version: {version}\n")


OF_0_1 = """
version: 1
objective: {num_view_draws: 1, temperature: 0.3}
optimizer: {learning_rate: 0.01}
public: {num_public_negatives: 0, subspace_dim: 0, subspace_groups: null, subspace_every_steps: 1}
data: {dataset: digits, public_records: null}
"""


def test_file_of_an_earlier_version_is_read_where_its_options_did_nothing(read: Read) -> None:
    now = (
        "version: 1\nobjective: {temperature: 0.3}\noptimizer: {learning_rate: 0.01}\ndata: {dataset: digits}"
    )
    assert read(OF_0_1) == read(now)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("num_view_draws: 1", "num_view_draws: 4", "objective.num_view_draws = 4"),
        ("num_public_negatives: 0", "num_public_negatives: 64", "public.num_public_negatives = 64"),
        ("subspace_dim: 0", "subspace_dim: 32", "public.subspace_dim = 32"),
        ("public_records: null", "public_records: procedural", "data.public_records = 'procedural'"),
        ("learning_rate: 0.01", "name: noise_sgd", "optimizer = 'noise_sgd'"),
    ],
)
def test_file_of_an_earlier_version_is_refused_with_what_to_use_instead(
    before: str, after: str, named: str, read: Read
) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(OF_0_1.replace(before, after))
    assert named in str(refusal.value)
    assert "removed in 0.2.0: use " in str(refusal.value)


def test_key_beside_removed_ones_is_as_unknown_as_ever(read: Read) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'public\.colour'"):
        read("version: 1\npublic: {colour: 1}")


def test_removed_option_of_a_command_says_what_to_use_instead(read: Read) -> None:
    with pytest.raises(ConfigError) as refusal:
        read("version: 1", "--num-view-draws", "4")
    assert "--num-view-draws" in str(refusal.value)
    assert "removed in 0.2.0: use " in str(refusal.value)
