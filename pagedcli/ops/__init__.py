"""See docs/architecture.md: layer `ops`."""
