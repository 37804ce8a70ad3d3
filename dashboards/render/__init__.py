"""The rendering of content: Vega-Lite specification, pictures, pages and tables."""
