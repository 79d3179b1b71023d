"""See docs/architecture.md: layer `text`."""
