"""Model families: config to spec, spec to wiring over the ops protocol. Imports no backend."""
