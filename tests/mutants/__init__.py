"""Deliberate breakages of the privacy code, each of which named tests must catch: `make mutants`."""
