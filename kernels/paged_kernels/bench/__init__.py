"""Microbenchmarks of the native kernels: `python -m paged_kernels.bench`."""
