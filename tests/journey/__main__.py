"""`python -m tests.journey images FOLDER`, or `captions`: the hour of `tests.journey.hour`, to be watched."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.journey.hour import JOURNEYS, prepare


def main() -> None:
    """Make clone and data in a new folder, and go the whole way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("journey", choices=JOURNEYS)
    parser.add_argument("folder", type=Path, help="a new folder")
    given = parser.parse_args()
    JOURNEYS[given.journey](*prepare(given.folder.absolute()))


if __name__ == "__main__":
    main()
