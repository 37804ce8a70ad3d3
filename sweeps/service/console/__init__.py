"""The terminal output: lines, the redrawn region, and the plan of a sweep."""
