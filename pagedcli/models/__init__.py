"""See docs/architecture.md: layer `models`."""
