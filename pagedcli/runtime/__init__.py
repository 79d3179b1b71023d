"""See docs/architecture.md: layer `runtime`."""
