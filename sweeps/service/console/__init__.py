"""The terminal: lines, the region that is redrawn, and the plan of a sweep."""
