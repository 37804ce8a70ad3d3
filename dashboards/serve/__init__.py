"""The storage folder in a browser: which sweeps run, their reports, and what the ledgers have left."""
