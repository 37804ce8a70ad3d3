"""The content of figures, made from tables of trials without MLflow or a plotting library."""
