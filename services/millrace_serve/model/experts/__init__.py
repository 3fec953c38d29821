"""The routed experts of a layer: which rank holds them, and how tokens reach them."""
