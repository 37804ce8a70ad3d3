"""Trials on a Ray cluster: its session and capacity, and the monitoring of running trainings."""
