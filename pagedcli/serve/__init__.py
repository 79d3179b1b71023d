"""See docs/architecture.md: layer `serve`."""
