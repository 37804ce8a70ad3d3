"""The durable files of a sweep."""
