"""See docs/architecture.md: layer `bench`."""
