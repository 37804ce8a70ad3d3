"""What MLflow holds: sweeps, and their trials as tables."""
