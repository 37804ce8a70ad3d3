"""Planning a sweep's trainings: they are checked and calibrated before anything is spent."""
