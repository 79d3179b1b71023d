"""See docs/architecture.md: layer `checkpoint`."""
