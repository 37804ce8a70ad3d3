"""The budget that a sweep is charged to, and the privacy statement that it leaves."""
