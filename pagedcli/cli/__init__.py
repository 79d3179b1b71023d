"""See docs/architecture.md: layer `cli`."""
