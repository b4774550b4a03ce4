"""The proposal q(x | y): contexts, guides and the product of factors."""
