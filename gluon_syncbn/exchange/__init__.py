"""Ways for packed statistics to leave shared memory. Nothing here knows about layers."""
