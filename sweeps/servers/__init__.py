"""`python -m sweeps.servers`: PostgreSQL and an MLflow server on it, with the ledger beside, for a team."""
