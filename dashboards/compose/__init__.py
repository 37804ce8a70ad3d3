"""What is shown: the content of a figure, from tables of trials, without MLflow or a plotting library."""
