"""Exported models in MLflow's model registry: what `--register` writes.

A version holds the unchanged exported folder, the code that loads it (`trainers` and `dpgcl_core`) and the
versions of the packages that this code needs. So `mlflow.pyfunc.load_model("models:/NAME/1")` works even if
this project is not installed. The version's description is the model card, and its tags are the guarantees in
`model.json`.

*What a version discloses.* All of its content is in the exported folder, which is released
(`trainers.export.export_folder`). A sealed sweep's model exists only from the sweep's publication on. Its
version is attached to its own run, created at registration, so that the sweep's one run keeps its masked
times and gets no files.
"""

from __future__ import annotations

import importlib.metadata
import re
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import dpgcl_core
import trainers
from dpgcl_core.errors import ConfigError, TrackingError
from dpgcl_core.release.markdown import escaped
from trainers.export.description import CLIP, ModelDescription, read_description
from trainers.models.encoder import NETWORKS
from trainers.tracking.mlflow_server import connect, search_runs, server_errors
from trainers.tracking.runs import ROLE_TAG, SEALED_ROLE, SWEEP_ROLE, SWEEP_TAG, TRIAL_ROLE, TRIAL_TAG

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.models import ModelSignature
    from mlflow.tracking import MlflowClient

CARD = "README.md"
REQUIRED = ("numpy", "pillow", "pyarrow", "safetensors", "scipy", "sqlalchemy", "torch", "dp-accounting")
"""Packages that loading and running an image encoder imports."""
REQUIRED_OF_CLIP = ("open_clip_torch", "peft", "timm")
REQUIRED_OF_TORCHVISION = ("torchvision",)
_ARTIFACT = "model"
_MAX_CARD_CHARACTERS = 5000
_TAGS = (
    *("sweep", "trial", "method", "dataset", "data", "guarantee_label", "neighboring_relation"),
    *("epsilon", "delta", "sweep_epsilon", "sweep_delta", "sha256"),
)
_NOT_IN_A_NAME = re.compile(r"[/:.%\"'\s]+")


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A version of a registered model.

    Attributes:
      name: name of the registered model.
      version: the version's number.
      is_new: whether this call registered it.
    """

    name: str
    version: str
    is_new: bool

    @property
    def uri(self) -> str:
        """The address for `mlflow.pyfunc.load_model`."""
        return f"models:/{self.name}/{self.version}"


def register(folder: Path, tracking_uri: str, name: str | None = None) -> Registered:
    """Register an exported model, unless a version of the registered model already holds its weights.

    Args:
      folder: folder written by `python -m trainers.export`.
      tracking_uri: address of the MLflow server or database that has the sweep.
      name: name of the registered model; `dpgcl-SWEEP` by default.

    Raises:
      ConfigError: the network is the user's own, which MLflow would have to import by name.
      TrackingError: the server failed, or does not have the sweep.
      StorageError: the folder is not an exported model.
    """
    description = read_description(folder)
    if description.network not in NETWORKS and description.network.count(":") == 1:
        raise ConfigError(
            f"a registered model is loaded without --network, so its network must be one of this project; "
            f"got {description.network}. Load the model from its folder, with --network."
        )
    name = name or registered_name(description.sweep)
    client = connect(tracking_uri)
    with server_errors(tracking_uri, f"registering the model {name!r}"):
        if (registered_version := _version_of(client, name, description)) is not None:
            return Registered(name=name, version=registered_version, is_new=False)
        run_id = _find_or_create_run(client, description)
        with tempfile.TemporaryDirectory(prefix="dpgcl-register-") as temporary:
            write_pyfunc(folder, Path(temporary) / _ARTIFACT, description)
            client.log_artifacts(run_id, str(Path(temporary) / _ARTIFACT), _artifact_path(description))
        version = _create_version(client, name, run_id, folder, description)
    return Registered(name=name, version=version, is_new=True)


def registered_name(sweep: str) -> str:
    """Return the name under which a sweep's models are registered.

    >>> registered_name("scans: first/second")
    'dpgcl-scans-first-second'
    """
    return f"dpgcl-{_NOT_IN_A_NAME.sub('-', sweep).strip('-')}"


def write_pyfunc(folder: Path, target: Path, description: ModelDescription) -> None:
    """Write an exported model as MLflow's pyfunc: data, code and requirements.

    Args:
      folder: folder of the exported model.
      target: a new folder.
      description: the model's description.
    """
    import mlflow.pyfunc

    packages = [str(Path(str(package.__file__)).parent) for package in (trainers, dpgcl_core)]
    with warnings.catch_warnings(action="ignore"):  # it asks for an example input, which would be an image
        mlflow.pyfunc.save_model(
            str(target),
            loader_module="trainers.pyfunc",
            data_path=str(folder),
            code_paths=packages,
            pip_requirements=requirements_of(description),
            signature=_signature(description),
            metadata=tags_of(description),
        )


def requirements_of(description: ModelDescription) -> list[str]:
    """Return the packages that loading the model needs, in the versions installed here.

    >>> import re
    >>> all(re.fullmatch(r"[\\w-]+==[\\d.]+\\w*", each) for each in _pinned(REQUIRED))
    True
    """
    names = [*REQUIRED]
    if description.encoder_kind == CLIP:
        names += REQUIRED_OF_CLIP
    if description.network.startswith("resnet"):
        names += REQUIRED_OF_TORCHVISION
    return _pinned(names)


def _pinned(names: tuple[str, ...] | list[str]) -> list[str]:
    """Return packages with versions, without the suffix after a +, which only one package index has."""
    return [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in names]


def tags_of(description: ModelDescription) -> dict[str, str]:
    """Return the model's source and guarantees as tags of its registered version."""
    values = {name: getattr(description, name) for name in _TAGS}
    return {f"dpgcl.{name}": "none" if value is None else str(value) for name, value in values.items()}


def card_of(folder: Path, description: ModelDescription) -> str:
    """Return the model card, cut to the registry's longest description; the guarantee comes first."""
    try:
        card = (folder / CARD).read_text(encoding="utf-8")
    except OSError:  # an older version wrote none
        card = f"**{escaped(description.promise)}**"
    return card if len(card) <= _MAX_CARD_CHARACTERS else card[: _MAX_CARD_CHARACTERS - 1] + "…"


def _signature(description: ModelDescription) -> ModelSignature:
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ParamSchema, ParamSpec, Schema, TensorSpec

    images = TensorSpec(np.dtype("uint8"), (-1, *description.image_shape))
    embeddings = TensorSpec(np.dtype("float32"), (-1, -1))
    params = ParamSchema([ParamSpec("features", "string", "backbone")])
    return ModelSignature(inputs=Schema([images]), outputs=Schema([embeddings]), params=params)


def _version_of(client: MlflowClient, name: str, description: ModelDescription) -> str | None:
    """Return the registered model's version that holds these weights; None if there is none."""
    versions = client.search_model_versions(f"name = '{name}'")
    return next((str(v.version) for v in versions if v.tags.get("dpgcl.sha256") == description.sha256), None)


def _find_or_create_run(client: MlflowClient, description: ModelDescription) -> str:
    """Return the run to attach the version to: the trial's run, or a new one if the sweep is sealed."""
    experiments = [each.experiment_id for each in client.search_experiments()]

    def runs_of(role: str, **tags: str) -> list[Run]:
        return search_runs(client, experiments, {ROLE_TAG: role} | tags)

    sweep = {SWEEP_TAG: description.sweep}
    if description.trial is not None:
        runs = runs_of(TRIAL_ROLE, **sweep, **{TRIAL_TAG: description.trial})
        if runs:
            return str(runs[0].info.run_id)
    elif sealed := runs_of(SEALED_ROLE, **sweep):
        run = client.create_run(
            sealed[0].info.experiment_id,
            tags=sweep | {ROLE_TAG: "export"},
            run_name=f"{description.sweep}: exported model",
        )
        client.set_terminated(run.info.run_id, "FINISHED")
        return str(run.info.run_id)
    names = sorted({run.data.tags[SWEEP_TAG] for role in (SWEEP_ROLE, SEALED_ROLE) for run in runs_of(role)})
    raise TrackingError(
        f"MLflow has no run of sweep {description.sweep!r}, trial {description.trial!r}, to attach "
        f"the model to; its sweeps: {', '.join(names) or 'none'}. Set --tracking-uri to the address that "
        "the sweep logged to."
    )


def _artifact_path(description: ModelDescription) -> str:
    return f"{_ARTIFACT}-{description.sha256[:12]}"


def _create_version(
    client: MlflowClient, name: str, run_id: str, folder: Path, description: ModelDescription
) -> str:
    """Create a version of the registered model, which is created if it is new; return its number."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description=f"Models of the sweep {escaped(description.sweep)}.")
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    root = client.get_run(run_id).info.artifact_uri
    version = client.create_model_version(
        name,
        source=f"{root}/{_artifact_path(description)}",
        run_id=run_id,
        tags=tags_of(description),
        description=card_of(folder, description),
    )
    return str(version.version)
