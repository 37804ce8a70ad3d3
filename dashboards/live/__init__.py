"""What goes on now: how far trainings are, and the page that shows it."""
