"""Which engines live where, and how weights reach them."""
