"""The decisions: which request gets which blocks and how many tokens in a step. Standard library only."""
