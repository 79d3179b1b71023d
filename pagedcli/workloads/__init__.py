"""Seeded lists of requests, shared by the benchmarks, the tests and the simulator. Standard library only."""
