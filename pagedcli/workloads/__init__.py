"""See docs/architecture.md: layer `workloads`."""
