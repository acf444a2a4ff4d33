"""Commands for who looks after a machine that several people use."""
