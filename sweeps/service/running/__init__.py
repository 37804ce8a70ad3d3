"""Running a plan: trials on Ray Tune, searches, comparisons and sealed sweeps."""
