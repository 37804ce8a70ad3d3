"""The options of sweeps: one tree, its command line and its file."""
