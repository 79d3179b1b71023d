"""paged: language models over one paged KV engine."""
