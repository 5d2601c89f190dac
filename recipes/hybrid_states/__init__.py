"""Ways to treat states in block mode, compared on a tiny hybrid model; see README.md."""
