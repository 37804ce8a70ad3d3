"""How it is shown: Vega-Lite specification, pictures, pages and tables."""
