"""The routed experts of a layer: their place on ranks, and the way of tokens to them."""
