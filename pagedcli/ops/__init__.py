"""The functions that models compute with: a protocol, weight handles, and the backends behind it."""
