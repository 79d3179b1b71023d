"""See docs/architecture.md: layer `engine`."""
