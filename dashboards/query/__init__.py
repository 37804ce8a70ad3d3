"""The data in MLflow: sweeps, and their trials as tables."""
