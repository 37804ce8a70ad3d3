"""Exported models in MLflow's registry: loaded by MLflow alone, with the statement as their card."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpgcl_core.errors import ConfigError, TrackingError
from tests.trainers.databases import open_tracker
from tests.trainers.exporting import write_small_clip, write_small_model
from trainers.embed.embed_images import embed_images
from trainers.export.description import ModelDescription, read_description, write_description
from trainers.export.export_folder import load_encoder
from trainers.export.model_registry import register, registered_name, requirements_of
from trainers.export.trial import main
from trainers.pyfunc import EmbeddingModel
from trainers.tracking.runs import Tracker

IMAGES = np.random.default_rng(0).integers(0, 256, (7, 1, 8, 8), dtype=np.uint8)
LOAD = """
import sys, numpy as np
import mlflow
loaded = mlflow.pyfunc.load_model(sys.argv[1])
np.save(sys.argv[3], loaded.predict(np.load(sys.argv[2])))
import trainers, dpgcl_core
print(trainers.__file__, dpgcl_core.__file__)
"""
BARE = """
import sys, importlib.metadata as metadata
allowed, known = set(sys.argv[4].split(",")), metadata.packages_distributions()

class Installed:  # finds nothing that pip would not have installed
    def __init__(self, inner):
        self.inner = inner

    def find_spec(self, name, path=None, target=None):
        owners = {each.replace("_", "-").replace(".", "-").lower() for each in known.get(name, ())}
        hidden = path is None and owners and not owners & allowed
        return None if hidden else self.inner.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.inner, name)

sys.meta_path[:] = [Installed(each) for each in sys.meta_path]
sys.path.insert(0, sys.argv[1])
import numpy as np
from trainers.pyfunc import _load_pyfunc
print(_load_pyfunc(sys.argv[2]).predict(np.zeros((2, *map(int, sys.argv[3].split(","))), np.uint8)).shape)
"""


@pytest.fixture
def tracked(tmp_path: Path) -> tuple[Tracker, str, Path]:
    """A tracker with the trial `a` of the sweep `one`, its address, and the exported model."""
    tracker = open_tracker(tmp_path)
    parent = tracker.start_sweep("one", {"dataset": "digits"}, {"data_is": "public"})
    tracker.log_trial(parent, "a", {}, {}, {}, {})
    write_small_model(tmp_path / "model")
    return tracker, f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "model"


def _changed(folder: Path, **changes: object) -> ModelDescription:
    description = dataclasses.replace(read_description(folder), **changes)  # type: ignore[arg-type]
    write_description(folder, description)
    return description


def _run(code: str, *arguments: str, **environment: str) -> str:
    """Run Python without this project's path, or anything else of this process's."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *arguments],
        env=kept | {"MLFLOW_DISABLE_TELEMETRY": "true"} | environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.ci
def test_registered_model_is_loaded_by_mlflow_in_a_fresh_process(tracked, tmp_path):
    _, uri, folder = tracked
    found = register(folder, uri)
    np.save(tmp_path / "images.npy", IMAGES)
    said = _run(
        LOAD,
        found.uri,
        *map(str, (tmp_path / "images.npy", tmp_path / "found.npy")),
        MLFLOW_TRACKING_URI=uri,
    )
    own, _ = load_encoder(folder)
    assert np.array_equal(np.load(tmp_path / "found.npy"), embed_images(own, IMAGES))
    assert all("/artifacts/" in path for path in said.split())  # the code is the model's own, not this one


def _closure(requirements: list[str]) -> set[str]:
    """The distributions that pip would install, by their normalised names."""
    found: set[str] = set()
    waiting = [re.split(r"[=<>!~;\[ ]", each)[0] for each in requirements]
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # of another platform
            continue
        waiting += [re.split(r"[=<>!~;\[ (]", each)[0] for each in needed if "extra ==" not in each]
    return found


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["encoder", "clip"])
def test_model_is_loaded_where_its_declared_requirements_alone_are_installed(kind, tmp_path):
    folder = tmp_path / "model"
    (write_small_clip if kind == "clip" else write_small_model)(folder)
    description = read_description(folder)
    shape = ",".join(map(str, description.image_shape))
    arguments, needed = (str(Path(__file__).parents[3]), str(folder), shape), requirements_of(description)
    installed = _closure(needed) | {"dpgcl"}
    assert _run(BARE, *arguments, ",".join(installed)).startswith("(2, ")
    without = installed - {"safetensors", "open-clip-torch"}
    with pytest.raises(AssertionError, match=r"safetensors|open_clip"):
        _run(BARE, *arguments, ",".join(without))


def test_pyfunc_gives_the_embeddings_of_the_model_and_refuses_other_images(tmp_path):
    write_small_model(tmp_path / "model")
    own, _ = load_encoder(tmp_path / "model")
    model = EmbeddingModel(tmp_path / "model")
    assert np.array_equal(model.predict(IMAGES), embed_images(own, IMAGES))
    assert np.array_equal(model.predict({"images": IMAGES}), embed_images(own, IMAGES))
    assert model.predict(IMAGES, {"features": "projection"}).shape == (7, 8)
    for wrong in (IMAGES.astype(np.float32), IMAGES[:, 0], IMAGES[..., :7]):
        with pytest.raises(Exception, match="uint8"):
            model.predict(wrong)


@pytest.mark.ci
def test_version_carries_the_statement_and_its_numbers(tracked):
    tracker, uri, folder = tracked
    _changed(folder, promise="a promise <img src=x> | `b`")
    found = register(folder, uri)
    version = tracker.client.get_model_version(found.name, found.version)
    assert version.description == (folder / "README.md").read_text("utf-8")
    assert version.tags["dpgcl.sweep_epsilon"] == "2.0"
    assert version.tags["dpgcl.guarantee_label"] == "proven"
    assert tracker.client.get_run(version.run_id).data.tags["dpgcl.trial"] == "a"


@pytest.mark.ci
def test_same_weights_are_registered_once(tracked):
    tracker, uri, folder = tracked
    assert register(folder, uri).is_new
    again = register(folder, uri)
    assert (again.is_new, again.version) == (False, "1")
    assert len(tracker.client.search_model_versions("name = 'dpgcl-one'")) == 1


@pytest.mark.ci
def test_model_of_a_sealed_sweep_leaves_its_masked_run_alone(tracked):
    tracker, uri, folder = tracked
    sealed = tracker.log_sealed("secret", {}, {}, {}, sweep_id="1")
    before = tracker.client.get_run(sealed).to_dictionary()
    _changed(folder, sweep="secret", trial=None)
    found = register(folder, uri)
    assert tracker.client.get_run(sealed).to_dictionary() == before
    assert not tracker.client.list_artifacts(sealed)
    version = tracker.client.get_model_version(found.name, found.version)
    assert version.run_id != sealed
    assert version.tags["dpgcl.trial"] == "none"


@pytest.mark.ci
def test_sealed_sweep_that_is_not_published_yet_cannot_be_registered(tracked):
    _, uri, folder = tracked
    _changed(folder, sweep="secret", trial=None)
    with pytest.raises(TrackingError, match="no run of sweep 'secret'"):
        register(folder, uri)


def test_network_of_ones_own_is_not_registered(tmp_path):
    write_small_model(tmp_path / "model")
    _changed(tmp_path / "model", network="mine.models:network")
    with pytest.raises(ConfigError, match="of this project"):
        register(tmp_path / "model", f"sqlite:///{tmp_path / 'mlflow.db'}")


def test_options_of_the_registry_need_register():
    with pytest.raises(ConfigError, match="--register"):
        main(["--sweep", "one", "--registered-name", "a"])


@pytest.mark.parametrize("sweep", ["a/b: c", "100%", 'it\'s "x"', "a.b"])
def test_registered_names_hold_nothing_that_mlflow_refuses(sweep):
    assert re.fullmatch(r"dpgcl-[^/:.%\"'\s]+", registered_name(sweep))
