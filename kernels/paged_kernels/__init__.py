"""Kernels of paged and their reference in plain torch; never imports pagedcli."""
