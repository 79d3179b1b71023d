"""See docs/architecture.md: layer `api`."""
