"""Trials on a Ray cluster: its session and capacity, and what follows trainings while they run."""
