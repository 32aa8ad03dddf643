"""Draw plans, their forecasts and measured runs: HTML pages, SVG pictures, Graphviz."""
