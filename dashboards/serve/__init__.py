"""The storage folder in a browser: the running sweeps, their reports, and the ledgers' remaining budgets."""
