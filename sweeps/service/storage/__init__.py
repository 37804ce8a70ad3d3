"""What of a sweep lasts on disk."""
