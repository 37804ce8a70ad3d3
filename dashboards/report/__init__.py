"""The report of a sweep: one page with its answer, figures, trials, privacy, and how to repeat it."""
