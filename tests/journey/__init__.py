"""A newcomer's first hour, one script from a clean clone to a probe; every printed command is pasted."""
