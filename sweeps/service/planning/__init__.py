"""What a sweep will train, checked and calibrated before anything is spent."""
