"""The starting values of a sweep's options: a file, a named setting, or a preset."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dpgcl_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Start:
    """Starting values of the options."""

    config: Path | None = None
    """YAML or JSON file with options, such as the config.yaml in every sweep's folder."""
    setting: str | None = None
    """Named defaults of all training options: auto (CPU-sized for the data set), cpu, paper, …"""
    tiny: bool = False
    """Two small trials, to check that everything works."""
    full: bool = False
    """The paper's grid at the paper's setting (a GPU is advised)."""

    def __post_init__(self) -> None:
        if self.tiny and self.full:
            raise ConfigError("set tiny or full, not both")
