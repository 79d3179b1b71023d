"""The kernels alone on models' shapes, checked and timed by worker processes; `paged bench kernels` asks them."""
